"""The host optimizer where there is no native one: torch's own optimizers, and casts around them.

Several passes over memory instead of one, and within rounding of the native kernel instead of equal to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from .segment import AdamRule, Rule, Segment, SGDRule


def refuse(segment: Segment) -> None:
    """Torch has no stochastic rounding and no split master."""
    if any(moment.dtype is not torch.float32 for moment in segment.moments):
        raise ValueError("16-bit moments need the native kernel, which is missing here; keep fp32 moments")
    if segment.is_split:
        raise ValueError("a split master needs the native kernel, which is missing here; keep an fp32 master")


def update(segments: Sequence[Segment], rules: Sequence[Rule], factor: float) -> None:
    """One step of every segment."""
    for segment, rule in zip(segments, rules, strict=True):
        gradient = segment.gradient.float() * factor
        if isinstance(rule, AdamRule):
            _adam(segment, rule, gradient)
        else:
            _sgd(segment, rule, gradient)
        if segment.parameter is not None:
            publish(segment.master, segment.parameter)


def publish(master: Tensor, parameter: Tensor) -> None:
    """The 16-bit parameter: fp16 to nearest even, bf16 half away from zero, as native/rounding.h does and why."""
    if parameter.dtype is torch.bfloat16:
        bits = master.view(torch.int32)
        rounded = torch.where(master.isnan(), 0x7FC0, (bits + 0x8000) >> 16)
        parameter.view(torch.int16).copy_(rounded)
    else:
        parameter.copy_(master)


def _adam(segment: Segment, rule: AdamRule, gradient: Tensor) -> None:
    first, second = segment.moments
    (adamw if rule.decoupled else adam)(
        [segment.master],
        [gradient],
        [first],
        [second],
        [],
        [torch.tensor(float(rule.step - 1))],  # torch counts the step itself
        fused=True,
        amsgrad=False,
        beta1=rule.beta1,
        beta2=rule.beta2,
        lr=rule.lr,
        weight_decay=rule.weight_decay,
        eps=rule.eps,
        maximize=rule.maximize,
    )


def _sgd(segment: Segment, rule: SGDRule, gradient: Tensor) -> None:
    buffers: list[Tensor | None] = [None if rule.first or not segment.moments else segment.moments[0]]
    sgd(
        [segment.master],
        [gradient],
        buffers,
        foreach=False,
        weight_decay=rule.weight_decay,
        momentum=rule.momentum,
        lr=rule.lr,
        dampening=rule.dampening,
        nesterov=rule.nesterov,
        maximize=rule.maximize,
    )
    if rule.first and segment.moments and buffers[0] is not None:
        segment.moments[0].copy_(buffers[0])


def accumulate(total: Tensor, gradient: Tensor, factor: float, first: bool) -> None:
    """Add a gradient times a factor to an fp32 total."""
    scaled = gradient.float() * factor
    if first:
        total.copy_(scaled)
    else:
        total.add_(scaled)


def square_sum(values: Tensor) -> float:
    """The sum of squares in fp64."""
    return float(values.double().square().sum())
