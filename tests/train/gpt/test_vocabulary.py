"""The loss of logits that ranks divide is that of all logits together."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.ranks import on_ranks
from zeroshard.train.gpt.vocabulary import IGNORED, DividedLoss


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


def loss_and_gradient(values: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    divided = distribute_tensor(values, init_device_mesh("cpu", (2,)), [Shard(-1)]).requires_grad_()
    loss = DividedLoss()(divided, targets)
    loss.backward()
    assert divided.grad is not None
    return loss.detach(), divided.grad.full_tensor()


@pytest.mark.parametrize("masked", [[0], [4], [0, 4], [0, 1, 2, 3], [4, 5, 6, 7]])
@on_ranks(2)
def test_tokens_that_are_masked_out_leave_the_others_as_they_are(masked: list[int]) -> None:
    values = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    values[..., masked] = -math.inf
    values[0, 0, 5] = math.inf  # which counts for nothing, as its target does not
    targets = torch.full((2, 6), 1 if 1 not in masked else 5)
    targets[0, 0] = IGNORED
    whole = values.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten())
    expected.backward()
    assert math.isfinite(float(expected))
    loss, gradient = loss_and_gradient(values, targets)
    torch.testing.assert_close(loss, expected.detach())
    assert whole.grad is not None
    torch.testing.assert_close(gradient[:, 1:], whole.grad[:, 1:])


@pytest.mark.parametrize("wrong", [-1, -99, 19, 20, 10**6])
@on_ranks(2)
def test_a_target_that_is_no_token_gives_no_plausible_loss(wrong: int) -> None:
    values = torch.randn(2, 6, 19, generator=torch.Generator().manual_seed(0))
    targets = torch.ones(2, 6, dtype=torch.long)
    targets[1, 3] = wrong
    loss, gradient = loss_and_gradient(values, targets)
    assert loss.isnan()
    assert gradient[1, 3].isnan().all()


@on_ranks(2)
def test_the_mean_of_no_position_is_nan_as_in_torch() -> None:
    loss, gradient = loss_and_gradient(torch.ones(1, 3, 8), torch.full((1, 3), IGNORED))
    assert loss.isnan()
    assert gradient.isnan().all()


@on_ranks(2)
def test_a_second_derivative_is_refused() -> None:
    values = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0))
    divided = distribute_tensor(values, init_device_mesh("cpu", (2,)), [Shard(-1)]).requires_grad_()
    loss = DividedLoss()(divided * divided, torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, divided, create_graph=True)
