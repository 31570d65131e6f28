"""The kernel's tables for one flat: which memory an update reads and writes, prepared once and kept."""

from __future__ import annotations

from torch import Tensor

from ..system import compat
from .kernel import Batch, Pool, Segment
from .states import HostPiece, HostStates

KEPT_TABLES = 32
"""For one flat: one for each buffer that its gradient may be in, and each set of parameters in use."""


class Tables:
    """Of one flat, by buffers and parameters in use."""

    def __init__(self, states: HostStates, pool: Pool) -> None:
        self._states, self._pool = states, pool
        self._kept: dict[tuple[int, int, tuple[int, ...]], Batch] = {}

    def find(
        self, gradient: Tensor, output: Tensor, used: tuple[int, ...], instead: Tensor | None = None
    ) -> tuple[Batch, list[int]]:
        """The table for some parameters and the buffers they are in now, and whose rule each entry takes.

        Tables are kept, but for a gradient that comes ``instead`` of the buffer's.
        """
        pieces = [piece for piece in self._states.pieces if piece.slot in used]
        key = (compat.pointer(gradient), compat.pointer(output), used)
        batch = self._kept.get(key)
        if batch is None or instead is not None:
            source = gradient if instead is None else instead
            batch = self._pool.prepare([self._segment(source, output, piece) for piece in pieces])
            if instead is None:
                if len(self._kept) >= KEPT_TABLES:  # the parameters in use change from step to step
                    self._kept.clear()
                self._kept[key] = batch
        return batch, [piece.slot for piece in pieces]

    def _segment(self, gradient: Tensor, output: Tensor, piece: HostPiece) -> Segment:
        states = self._states
        return Segment(
            gradient=states.part(gradient, piece),
            master=states.part(states.stored, piece),
            parameter=None if output is states.stored else states.part(output, piece),
            moments=states.moments(piece),
            rule=None,
            key=piece.key,
            start=piece.start,
        )
