"""The loss of logits that ranks divide is that of all logits together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.ranks import on_ranks
from zeroshard.train.vocabulary import IGNORED, DividedLoss


@pytest.mark.parametrize("vocabulary", [64, 19, 5])  # evenly, unevenly, and nothing left for the last rank
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(4)
def test_loss_and_gradients_are_those_of_undivided_logits(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (30 * torch.randn(2, 6, vocabulary, generator=generator)).to(dtype)
    targets = torch.randint(0, vocabulary, (2, 6), generator=generator)
    targets[1, 2] = IGNORED
    whole = values.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1).float(), targets.flatten())
    (1000 * expected).backward()
    mesh = init_device_mesh("cpu", (4,))
    divided = distribute_tensor(values, mesh, [Shard(-1)]).requires_grad_()
    loss = DividedLoss()(divided, targets)
    torch.testing.assert_close(loss, expected)
    for times in (1, 2):  # nothing that a second backward needs is overwritten
        (1000 * loss).backward(retain_graph=True)
        assert divided.grad is not None
        assert whole.grad is not None
        torch.testing.assert_close(divided.grad.full_tensor(), times * whole.grad)
    assert torch.equal(divided.full_tensor(), values)
    assert torch.equal(DividedLoss()(divided, None), values)
