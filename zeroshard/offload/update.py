"""One update of one flat on the host: what it waits for, the kernel's tables, and what follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config.layout import Piece
from ..system import compat
from .host_buffers import HostBuffers, part
from .kernel import Batch, Pool, Rule, Segment
from .pinned import Staging
from .pipeline import Factor, SentParameters

if TYPE_CHECKING:
    from .transfer import Transfer

MOST_TABLES = 32
"""For one flat: one for each buffer that its gradient may be in, and each set of parameters in use."""


class Tables:
    """The kernel's tables for one flat: which memory an update reads and writes, prepared once and used again."""

    def __init__(self, buffers: HostBuffers, keys: Mapping[Piece, int], pool: Pool) -> None:
        self._buffers, self._keys, self._pool = buffers, keys, pool
        self._known: dict[tuple[int, int, tuple[int, ...]], Batch] = {}

    def find(
        self, gradient: Tensor, output: Tensor, used: tuple[int, ...], instead: Tensor | None = None
    ) -> tuple[Batch, list[int]]:
        """The table for some parameters and the buffers they are in now, and whose rule each entry takes.

        Tables are stored, unless a gradient comes ``instead`` of the buffer's.
        """
        pieces = [piece for piece in self._keys if piece.slot in used]
        key = (compat.pointer(gradient), compat.pointer(output), used)
        batch = self._known.get(key)
        if batch is None or instead is not None:
            source = gradient if instead is None else instead
            batch = self._pool.prepare([self._segment(source, output, piece) for piece in pieces])
            if instead is None:
                if len(self._known) >= MOST_TABLES:  # the parameters in use change from step to step
                    self._known.clear()
                self._known[key] = batch
        return batch, [piece.slot for piece in pieces]

    def _segment(self, gradient: Tensor, output: Tensor, piece: Piece) -> Segment:
        buffers = self._buffers
        return Segment(
            gradient=part(gradient, piece),
            master=part(buffers.stored, piece),
            parameter=None if output is buffers.stored else part(output, piece),
            moments=tuple(buffers.moments(piece).values()),
            rule=None,
            key=self._keys[piece],
            start=piece.start,
        )


class Update:
    """One update of a flat: with the gradient in its slot or sum, or in a buffer of the ring."""

    def __init__(
        self,
        transfer: Transfer,
        rules: dict[int, Rule],
        factor: Factor,
        free: torch.cuda.Event | None,
        publication: SentParameters | None,
        *,
        landed: int = 0,
        following: Transfer | None = None,
        staging: Staging | None = None,
        high: Staging | None = None,
    ) -> None:
        self.label, self.numel, self.factor = transfer.label, transfer.buffers.numel, factor
        self._transfer, self._rules, self._free, self._publication = transfer, rules, free, publication
        self._landed, self._following, self._staging, self._high = landed, following, staging, high
        self._output: Tensor | None = None
        self.wide_gradient: Tensor | None = None
        """A gradient whose dtype is wider than a buffer of the ring has."""

    def prepare(self) -> tuple[Batch, Sequence[Rule]]:
        """Waits for what the update reads, and for copies that still read what it writes."""
        transfer, staging = self._transfer, self._staging
        if staging is None:
            self._high = transfer.wait_for_inputs(self._landed, self._free, self._following)
        transfer.wait_for_outputs(self._free)
        if self._high is not None:
            self._high.wait()
        gradient = transfer.gradient.value if staging is None else staging.tensor
        self._output = transfer.output(gradient) if self._high is None else self._high.tensor
        batch, slots = transfer.tables.find(gradient, self._output, tuple(sorted(self._rules)), self.wide_gradient)
        return batch, [self._rules[slot] for slot in slots]

    def finish(self) -> None:
        """Publishes, and gives the buffers back."""
        assert self._output is not None
        self._transfer.complete(self._output, self._rules)
        sent = None
        if self._staging is None:
            self._transfer.gradient.empty()
        if self._publication is not None:
            sent = self._transfer.send(self._output, self._publication, self._free)
        for staging in (self._staging, self._high):
            if staging is not None:
                staging.release(sent)
