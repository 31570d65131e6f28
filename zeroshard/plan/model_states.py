"""What is known of memory without a model: tensors that each optimizer has, and the share for model states."""

from __future__ import annotations

from collections.abc import Iterable

import torch

STATES_SHARE = 0.7
"""Model states may take this share of a device; the rest is for activations and buffers, where these are not known."""

STATE_TENSORS = {
    torch.optim.ASGD: 1,
    torch.optim.Adadelta: 2,
    torch.optim.Adagrad: 1,
    torch.optim.Adam: 2,
    torch.optim.AdamW: 2,
    torch.optim.Adamax: 2,
    torch.optim.NAdam: 2,
    torch.optim.RAdam: 2,
    torch.optim.RMSprop: 1,
    torch.optim.Rprop: 2,
    torch.optim.SGD: 0,
}
"""Tensors of a parameter's size that an optimizer keeps; options may add some. Unknown ones count as Adam."""


def state_tensors(optimizer: torch.optim.Optimizer) -> float:
    """Tensors of a parameter's size that an optimizer keeps, the mean of its groups."""
    base = STATE_TENSORS.get(type(optimizer), 2)
    return _mean(base + _extra(group) for group in optimizer.param_groups)


def _extra(group: dict[str, object]) -> int:
    return sum(bool(group.get(option)) for option in ("momentum", "amsgrad", "centered"))


def _mean(values: Iterable[float]) -> float:
    collected = list(values)
    return sum(collected) / len(collected)
