"""Cross-entropy of logits that are divided by vocabulary: each rank has the logits of its own tokens only.

Whole logits would be the largest tensor of a model with a large vocabulary. Ranks exchange three numbers for each
position: the highest logit, the sum of exponentials, and the logit of the token that followed. (``loss_parallel`` of
torch does the same, but then ``backward()`` must be called inside its context.)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

IGNORED = -100
"""A target that does not count, as in ``torch.nn.functional.cross_entropy``."""


class DividedLoss(nn.Module):
    """The mean loss of all positions, in fp32. All ranks of the mesh get the same value."""

    def forward(self, logits: DTensor, targets: Tensor | None) -> Tensor:
        """Return the loss, or the whole logits if there are no targets.

        Args:
            logits: [batch, sequence, vocabulary], divided by its last axis.
            targets: [batch, sequence], whole on every rank. A target that is neither a token nor ``IGNORED`` makes the
                loss NaN: an exception would make every step wait for the device.
        """
        if targets is None:
            return logits.full_tensor()
        mesh = logits.device_mesh
        first = math.ceil(logits.shape[-1] / mesh.size()) * mesh.get_local_rank()
        part = logits.to_local().flatten(0, 1)
        size = logits.shape[-1]
        loss: Tensor = _CrossEntropy.apply(part, targets.flatten(), first, size, mesh)  # type: ignore[no-untyped-call]
        return loss


class PartOfLoss(nn.Module):
    """What one rank computes of the loss, for a plan: the same tensors as in ``DividedLoss``, and no other ranks."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return a number without a meaning, from the logits of this rank's tokens."""
        part, size = logits.flatten(0, 1), logits.shape[-1]
        loss: Tensor = _CrossEntropy.apply(part, targets.flatten(), 0, size, None)  # type: ignore[no-untyped-call]
        return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, size: int, mesh: DeviceMesh | None) -> Tensor:
        own = logits.shape[-1]  # may be 0 on the last ranks, if the vocabulary is small
        highest = logits.amax(-1).float() if own else logits.new_full(targets.shape, -math.inf, dtype=torch.float32)
        highest = _over_ranks(highest, "max", mesh)
        values = logits.to(torch.float32, copy=True).sub_(highest[:, None])
        here = (targets >= first) & (targets < first + own)
        index = torch.where(here, targets - first, 0)[:, None]
        followed = torch.zeros_like(highest)
        if own:
            followed = torch.where(here, values.gather(-1, index)[:, 0], followed)
        values.exp_()
        followed, total = _over_ranks(torch.stack([followed, values.sum(-1)]), "sum", mesh)
        counted = targets != IGNORED
        valid_or_nan = torch.where((targets >= 0) & (targets < size), 1.0, math.nan)
        weight = torch.where(counted, valid_or_nan, 0) / counted.sum()
        ctx.save_for_backward(values, total, here, index, weight)
        ctx.dtype = logits.dtype
        loss: Tensor = torch.where(counted, (total.log() - followed) * valid_or_nan, 0).sum() / counted.sum()
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        if torch.is_grad_enabled():  # torch's once_differentiable would not raise here
            raise RuntimeError(
                "the loss of divided logits has no second derivative (create_graph=True); compute it from whole "
                "logits, as the model gives them without targets"
            )
        values, total, here, index, weight = ctx.saved_tensors
        share = gradient * weight
        scale = (share / total)[:, None]
        result = torch.empty_like(values, dtype=ctx.dtype)
        torch.mul(values, scale, out=result)
        if values.shape[-1]:
            at_target = values.gather(-1, index) * scale - (share * here)[:, None]
            result.scatter_(-1, index, at_target.to(ctx.dtype))
        return result, None, None, None, None


def _over_ranks(value: Tensor, operation: str, mesh: DeviceMesh | None) -> Tensor:
    if mesh is None:
        return value
    joined = DTensor.from_local(value, mesh, [Partial(operation)], run_check=False).redistribute(mesh, [Replicate()])
    return joined.to_local()
