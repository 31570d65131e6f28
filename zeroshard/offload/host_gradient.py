"""The gradient of one flat on the host: in the slot that it was copied to, or added up over micro-batches.

The mover thread writes the gradient. The updater thread reads it when the mover is done.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch import Tensor

from ..config.layout import Piece
from .host_buffers import HostBuffers, part
from .kernel import Pool


class HostGradient:
    """One flat's averaged gradient in host memory."""

    def __init__(self, buffers: HostBuffers, pieces: Sequence[Piece], pool: Pool) -> None:
        self._buffers, self._pieces, self._pool = buffers, pieces, pool
        self._occupied = self._summed = False
        self._square_sum: float | None = None

    @property
    def slot(self) -> Tensor:
        """Where the next micro-batch's gradient is copied to, in the parameters' dtype."""
        assert self._buffers.slot is not None
        return self._buffers.slot

    @property
    def value(self) -> Tensor:
        """The whole gradient."""
        if self._summed:
            assert self._buffers.total is not None
            return self._buffers.total
        return self.slot

    def make_room(self) -> bool:
        """Moves the slot's gradient into the sum. False if nothing came before, so that no sum is needed."""
        if not (self._occupied or self._summed):
            return False
        self._add_slot_up()
        return True

    def arrive(self, several: bool) -> None:
        """Notes that the slot was filled. ``several`` is what ``make_room`` returned before."""
        self._occupied, self._square_sum = True, None
        if several:
            self._add_slot_up()

    def add(self, values: Tensor) -> None:
        """Receives a gradient whose dtype is wider than the slot's."""
        total = self._add_slot_up()
        self._pool.accumulate(total, values, first=not self._summed)
        self._summed, self._square_sum = True, None

    def scale(self, factor: float) -> None:
        """Multiplies the whole gradient."""
        self._add_slot_up().mul_(factor)
        self._square_sum = None

    def zero(self, slots: Container[int]) -> None:
        """Zeroes the gradients of some parameters, by index in the flat."""
        for piece in self._pieces:
            if piece.slot in slots:
                part(self.value, piece).zero_()
        self._square_sum = None

    def empty(self) -> None:
        """Forgets the gradient: it was used, or is not wanted."""
        self._occupied = self._summed = False
        self._square_sum = None

    def square_sum(self, part: slice) -> float:
        """The sum of squares of a part, which must always be the same part. Computed again only after a change."""
        if self._square_sum is None:
            self._square_sum = self._pool.square_sum(self.value[part])
        return self._square_sum

    def _add_slot_up(self) -> Tensor:
        total = self._buffers.new_total()
        if self._occupied:
            self._pool.accumulate(total, self.slot, first=not self._summed)
            self._occupied, self._summed = False, True
        return total
