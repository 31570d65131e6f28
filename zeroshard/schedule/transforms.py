"""Calls of a sharded model inside ``torch.func``: in ``grad``, ``vmap``, ``jvp``, ``jacrev`` and others.

``torch.func`` calls the model with tensors that have no memory of their own, and every tensor that is made meanwhile is
of that kind. So a hook leaves ``torch.func`` for as long as it gathers. ``torch.func`` also computes derivatives by
itself, and no hook tells when. So all units must be there until it is done: in stage 3 the user's block keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..states.unit import Unit
from ..system import compat
from .lifetimes import Lifetimes


class Transforms:
    """Gathers the units of one model inside ``torch.func``."""

    def __init__(self, units: Sequence[Unit], lifetimes: Lifetimes, *, sharded: bool, scaled: bool) -> None:
        self._units, self._lifetimes = units, lifetimes
        self._sharded, self._scaled = sharded, scaled

    def enter(self, unit: Unit) -> None:
        """Makes a unit's parameters readable before its forward. Raises if they would be gone too soon."""
        if compat.transform_differentiates():
            self._check(unit)
        with compat.outside_transforms():
            self._lifetimes.require(unit)

    def _check(self, unit: Unit) -> None:
        if self._scaled:
            raise RuntimeError(
                "torch.func computes gradients of its own, which pass by the loss scale of this model; shard it with "
                'precision="bf16", or without precision='
            )
        if self._sharded and not unit.open_blocks:
            raise RuntimeError(
                f"torch.func needs the parameters of {unit.title!r} until its derivatives are computed, and they are "
                "divided among the ranks (stage 3); call torch.func inside `with zeroshard.gathered(model):` on all "
                "ranks"
            )

    def leave(self, unit: Unit) -> None:
        """Releases a unit after a forward that only computes values. An open block keeps the unit."""
        if self._sharded and not unit.open_blocks:
            with compat.outside_transforms():
                unit.release()

    def leave_model(self) -> None:
        self.leave(self._units[0])
        for unit in self._units:
            unit.watch()
