"""The host optimizer where there is no native library: torch's own optimizers, with casts before and after.

Torch makes several passes over memory instead of one. Its results agree with the native kernel within rounding.
``place.py`` refuses moments in 16 and 8 bits and split masters here, which torch does not have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from .host_buffers import round_to
from .rules import AdamRule, Rule, SGDRule

if TYPE_CHECKING:
    from .kernel import Segment


def update(work: Iterable[tuple[Segment, Rule]], factor: float) -> None:
    """One step of every segment."""
    for segment, rule in work:
        gradient = segment.gradient.float() * factor
        if isinstance(rule, AdamRule):
            _adam(segment, rule, gradient)
        else:
            _sgd(segment, rule, gradient)
        if segment.parameter is not None:
            segment.parameter.copy_(round_to(segment.master, segment.parameter.dtype))


def _adam(segment: Segment, rule: AdamRule, gradient: Tensor) -> None:
    first, second = segment.moments
    (adamw if rule.decoupled else adam)(
        [segment.master],
        [gradient],
        [first],
        [second],
        [],
        [torch.tensor(float(rule.step - 1), device="cpu")],  # torch adds 1 to the step count
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
    is_first = rule.step == 1
    buffers: list[Tensor | None] = [None if is_first or not segment.moments else segment.moments[0]]
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
    if is_first and segment.moments and buffers[0] is not None:
        segment.moments[0].copy_(buffers[0])


def accumulate(total: Tensor, gradient: Tensor, first: bool) -> None:
    """Adds a gradient to an fp32 total, or replaces the total by it."""
    if first:
        total.copy_(gradient)
    else:
        total.add_(gradient)


def square_sum(values: Tensor) -> float:
    """The sum of squares in fp64."""
    return float(values.double().square().sum())
