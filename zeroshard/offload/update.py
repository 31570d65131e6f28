"""One update of one flat, as the updater thread runs it: wait, compute, publish."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config.layout import Piece
from ..system import compat
from .host_buffers import HostBuffers, part, round_to
from .kernel import Pool, Segment, Segments
from .pinned import Staging
from .pipeline import HostFactor, SentParameters, wait_for_events
from .rules import Rule

if TYPE_CHECKING:
    from .transfer import Transfer

MOST_STORED = 32
"""Most entries in a flat's cache. Each buffer of the gradient and each set of parameters in use needs an entry."""


class SegmentCache:
    """The kernel's segments of one flat: the memory that an update reads and writes. Prepared once and used again."""

    def __init__(self, buffers: HostBuffers, keys: Mapping[Piece, int], pool: Pool) -> None:
        self._buffers, self._keys, self._pool = buffers, keys, pool
        self._known: dict[tuple[int, int, tuple[int, ...]], Segments] = {}

    def find(self, gradient: Tensor, output: Tensor, used: Collection[int]) -> Segments:
        """The segments of the parameters in use, by index in the flat, with these buffers."""
        key = (compat.pointer(gradient), compat.pointer(output), tuple(sorted(used)))
        if key not in self._known:
            if len(self._known) >= MOST_STORED:  # the parameters in use change from step to step
                self._known.clear()
            self._known[key] = self.make(gradient, output, used)
        return self._known[key]

    def make(self, gradient: Tensor, output: Tensor, used: Collection[int]) -> Segments:
        """As ``find``, without storing the segments."""
        pieces = [piece for piece in self._keys if piece.slot in used]
        return self._pool.prepare([self._segment(gradient, output, piece) for piece in pieces])

    def _segment(self, gradient: Tensor, output: Tensor, piece: Piece) -> Segment:
        buffers = self._buffers
        moments, scales = buffers.stored_moments(piece)
        return Segment(
            gradient=part(gradient, piece),
            master=part(buffers.stored, piece),
            parameter=None if output is buffers.stored else part(output, piece),
            moments=moments,
            key=self._keys[piece],
            start=piece.start,
            scales=scales,
        )


@dataclass(eq=False)
class Update:
    """One update of a flat."""

    transfer: Transfer
    rules: dict[int, Rule]
    """The rule of each parameter in use, by index in the flat."""
    factors: Sequence[tuple[HostFactor, Collection[int]]]
    """What gradients are multiplied by, with the parameters that each factor is for. One factor alone is for all."""
    free: torch.cuda.Event | None
    """The point from which on the device no longer reads the old parameters."""
    publication: SentParameters | None
    """None: the update is held back."""
    following: Transfer | None = None
    """The flat that is updated next."""
    landed: int = 0
    """The mover's job that brings the gradient."""
    staging: Staging | None = None
    """The buffer that the gradient is in, with ``update_in_backward``. Elsewhere the slot or the sum has it."""
    high: Staging | None = None
    """The high half of the master, if it is read back from the device."""
    wide_gradient: Tensor | None = None
    """A gradient whose dtype is wider than the buffer's. It is used in the buffer's place."""
    _output: Tensor = field(init=False)

    @property
    def factor(self) -> HostFactor | None:
        """The one factor of all parameters. None if there are several."""
        return self.factors[0][0] if len(self.factors) == 1 else None

    def prepare(self) -> list[tuple[HostFactor, Segments, Sequence[Rule]]]:
        """Waits until all inputs are there, and until no copy reads the memory that the update writes.

        Returns the work, by factor.
        """
        transfer, buffers = self.transfer, self.transfer.buffers
        if self.staging is None:
            transfer.pipeline.mover.wait(self.landed)
            if transfer.reads_back:
                self.high = transfer.take_high_half(self.free)
                if self.following is not None:
                    self.following.read_ahead(self.free)
        wait_for_events(transfer.sent, None if buffers.resting is None else self.free)
        if self.high is not None:
            wait_for_events(self.high.arrival)
        gradient = transfer.gradient.value if self.staging is None else self.staging.tensor
        output = self._output = buffers.output(gradient) if self.high is None else self.high.tensor
        work: list[tuple[HostFactor, Segments, Sequence[Rule]]] = []
        for factor, slots in self.factors:
            rules = self.rules if self.factor is not None else {s: self.rules[s] for s in slots if s in self.rules}
            if self.wide_gradient is None:
                segments = transfer.segments.find(gradient, output, rules.keys())
            else:
                segments = transfer.segments.make(self.wide_gradient, output, rules.keys())
            work.append((factor, segments, [rules[p.slot] for p in transfer.pieces if p.slot in rules]))
        return work

    def finish(self) -> None:
        """Publishes the new parameters, and gives the buffers back."""
        self._fill_unused()
        if self.staging is None:
            self.transfer.gradient.empty()
        sent = None
        if self.publication is not None:
            sent = self.transfer.send(self._output, self.publication, self.free)
        for staging in (self.staging, self.high):
            if staging is not None:
                staging.release(sent)

    def _fill_unused(self) -> None:
        """Writes parameters that were not updated over their gradients in the output, because all of it is sent."""
        buffers = self.transfer.buffers
        if self._output is buffers.stored or buffers.split:
            return
        for piece in self.transfer.pieces:
            if piece.slot not in self.rules:
                part(self._output, piece).copy_(round_to(part(buffers.stored, piece), buffers.dtype))
