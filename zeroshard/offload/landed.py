"""The gradient of one flat on the host: in the slot where it landed, or added up over micro-batches.

The mover writes it, and the updater reads it when the mover is done; neither knows of streams here.
"""

from __future__ import annotations

from collections.abc import Container

from torch import Tensor

from .kernel import Pool
from .states import HostStates


class LandedGradient:
    """What has landed, and where."""

    def __init__(self, states: HostStates, pool: Pool) -> None:
        self._states, self._pool = states, pool
        self._occupied = self._summed = False
        self._square_sum: float | None = None

    @property
    def slot(self) -> Tensor:
        """Where the next one lands, in the parameters' precision."""
        assert self._states.slot is not None
        return self._states.slot

    @property
    def value(self) -> Tensor:
        """All of it."""
        if self._summed:
            assert self._states.total is not None
            return self._states.total
        return self.slot

    def make_room(self) -> bool:
        """Empties the slot into the sum, exactly; False if nothing has landed before, so that none is needed."""
        if not (self._occupied or self._summed):
            return False
        self._add_slot_up()
        return True

    def arrive(self, several: bool) -> None:
        """The slot was filled; ``several`` is what ``make_room`` said before that."""
        self._occupied, self._square_sum = True, None
        if several:
            self._add_slot_up()

    def add(self, values: Tensor) -> None:
        """Takes one in more precision than the slot has."""
        total = self._add_slot_up()
        self._pool.accumulate(total, values, first=not self._summed)
        self._summed, self._square_sum = True, None

    def scale(self, factor: float) -> None:
        """Multiplies all of it."""
        self._add_slot_up().mul_(factor)
        self._square_sum = None

    def zero(self, slots: Container[int]) -> None:
        """Of some parameters."""
        for piece in self._states.pieces:
            if piece.slot in slots:
                self._states.part(self.value, piece).zero_()
        self._square_sum = None

    def empty(self) -> None:
        """It was used, or is not wanted."""
        self._occupied = self._summed = False
        self._square_sum = None

    def square_sum(self, part: slice) -> float:
        """Of a part, always the same one; remembered until something lands or changes."""
        if self._square_sum is None:
            self._square_sum = self._pool.square_sum(self.value[part])
        return self._square_sum

    def _add_slot_up(self) -> Tensor:
        total = self._states.new_total()
        if self._occupied:
            self._pool.accumulate(total, self.slot, first=not self._summed)
            self._occupied, self._summed = False, True
        return total
