"""Cross-entropy of many tokens over a large vocabulary, in little memory.

Logits of a micro-batch are often the largest tensor of a step. The usual way keeps two more of them in fp32 until
backward. Here forward goes through the tokens part by part, and leaves only the gradient, in the logits' own precision.
"""

from typing import Any

import torch
from torch import Tensor

from .packing import IGNORED

ELEMENTS = 1 << 25
"""Logits that are in fp32 at a time."""


class _SummedLoss(torch.autograd.Function):
    """The sum of the losses of tokens; its gradient is computed together with it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        rows = max(1, ELEMENTS // logits.shape[1])
        for start in range(0, len(logits), rows):
            part, wanted = logits[start : start + rows].float(), targets[start : start + rows, None]
            learned = wanted != IGNORED
            wanted = wanted.where(learned, 0)
            norm = part.logsumexp(1, keepdim=True)
            total += (norm - part.gather(1, wanted)).where(learned, 0).sum()
            if gradient is not None:
                part = (part - norm).exp_().scatter_add_(1, wanted, torch.full_like(norm, -1.0))
                gradient[start : start + rows] = part.where(learned, 0)
        if gradient is not None:
            ctx.save_for_backward(gradient)  # so that backward frees it, also where somebody keeps the loss
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(outer[0]), None


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the losses of all tokens whose target is not `IGNORED`, in fp32.

    Args:
        logits: [..., vocabulary], of any floating-point dtype.
        targets: [...] of integers, each the token to predict here.
    """
    result: Tensor = _SummedLoss.apply(logits.flatten(0, -2), targets.flatten())  # type: ignore[no-untyped-call]
    return result


def loss_function(logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return the same loss where transformers computes one, so that the plan counts the memory that it takes."""
    return summed_loss(logits, labels)
