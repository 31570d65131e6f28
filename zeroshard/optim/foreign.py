"""Refuses the step of an optimizer that holds parameters of a sharded model, and that shard() did not return.

Such a foreign optimizer sees neither averaged gradients nor the values that this rank updates, so its step would
destroy the weights. torch calls a hook before the step of every optimizer of the process. The hook raises before
anything changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..states.flat import Flat

_sharded: weakref.WeakSet[TrainedParameters] = weakref.WeakSet()
_own: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that zeroshard runs itself. Their steps are not looked at."""
_registered: list[object] = []


class TrainedParameters:
    """The trained parameters of one model, and the optimizer that ``shard()`` returned for them."""

    def __init__(self, flats: Iterable[Flat], optimizer: torch.optim.Optimizer) -> None:
        self._names = {
            id(parameter): slot.name
            for flat in flats
            for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True)
        }
        self._optimizer = optimizer
        _sharded.add(self)
        if not _registered:
            _registered.append(register_optimizer_step_pre_hook(_before_step))

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises if a foreign optimizer holds one of the parameters."""
        if optimizer.param_groups is self._optimizer.param_groups:
            return  # a wrapper, whose step calls the right one; or the one given to shard(), which has its own refusal
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is not None and parameter.requires_grad:
                    raise RuntimeError(
                        f"{type(optimizer).__name__}.step(): this optimizer holds {name!r}, a parameter of a sharded "
                        "model, but it is not the optimizer that zeroshard.shard() returned, so nothing was changed; "
                        "call step() on the optimizer that shard() returned, and give that one to libraries that would "
                        "make their own (Hugging Face: Trainer(..., optimizers=(optimizer, scheduler)))"
                    )


def step_freely(optimizer: torch.optim.Optimizer) -> None:
    """Marks an optimizer that zeroshard runs itself."""
    _own.add(optimizer)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _own:
        for trained in list(_sharded):
            trained.check(optimizer)
