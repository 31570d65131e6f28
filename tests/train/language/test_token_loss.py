"""The loss that takes little memory is the usual one."""

import pytest
import torch
import torch.nn.functional as F

from zeroshard.train.language import token_loss
from zeroshard.train.language.packing import IGNORED
from zeroshard.train.language.token_loss import summed_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [1, 100, 1 << 25])
def test_loss_and_gradient_are_those_of_torch(
    dtype: torch.dtype, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_loss, "ELEMENTS", elements)
    torch.manual_seed(0)
    logits = (4 * torch.randn(2, 9, 50)).to(dtype).requires_grad_()
    targets = torch.randint(50, (2, 9))
    targets[0, 3:6] = IGNORED
    usual = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    (expected,) = torch.autograd.grad(usual * 0.25, logits)
    found = summed_loss(logits, targets)
    (gradient,) = torch.autograd.grad(found * 0.25, logits)
    torch.testing.assert_close(found, usual)
    torch.testing.assert_close(gradient, expected)
    assert gradient.dtype is dtype
    assert torch.equal(summed_loss(logits.detach(), targets), found.detach())


def test_padding_alone_has_neither_loss_nor_gradient() -> None:
    logits = torch.randn(1, 3, 7, requires_grad=True)
    loss = summed_loss(logits, torch.full((1, 3), IGNORED))
    loss.backward()
    assert loss == 0
    assert logits.grad is not None
    assert not logits.grad.any()
