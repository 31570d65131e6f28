"""One flat's gradient on the host, and its copies between host and device.

Methods of ``Transfer`` say which thread runs them. The training thread asks for things and does not wait. The mover and
the updater do the work (``pipeline.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from ..config.layout import Piece
from ..system import compat, trace
from ..system.waits import Cause
from .host_buffers import HostBuffers, part
from .kernel import Pool
from .pinned import Staging
from .pipeline import HostFactor, Pipeline, SentParameters, wait_for_events
from .rules import Rule
from .update import SegmentCache, Update


class HostGradient:
    """One flat's averaged gradient in host memory: in the slot, or in the sum of several micro-batches.

    The mover writes the gradient. The updater reads it when the mover is done.
    """

    def __init__(self, buffers: HostBuffers, pieces: Sequence[Piece], pool: Pool) -> None:
        self._buffers, self._pieces, self._pool = buffers, pieces, pool
        self._in_slot = False
        self.is_sum = False
        self._square_sum: float | None = None

    @property
    def slot(self) -> Tensor:
        """Where the gradient of the next micro-batch is copied to, in the parameters' dtype."""
        assert self._buffers.slot is not None
        return self._buffers.slot

    @property
    def value(self) -> Tensor:
        """The whole gradient."""
        return self._buffers.total() if self.is_sum else self.slot

    def make_room(self) -> None:
        """Empties the slot: a gradient in it is added to the sum."""
        if self._in_slot:
            self._add_slot_up()

    def arrive(self) -> None:
        """Notes that the slot was filled."""
        self._in_slot, self._square_sum = True, None
        if self.is_sum:
            self._add_slot_up()

    def add(self, values: Tensor) -> None:
        """Adds a gradient whose dtype is wider than the slot's."""
        total = self._add_slot_up()
        self._pool.accumulate(total, values, first=not self.is_sum)
        self.is_sum, self._square_sum = True, None

    def scale(self, factor: float, slots: Collection[int] | None = None) -> None:
        """Multiplies the whole gradient, or the gradients of some parameters, by index in the flat."""
        total = self._add_slot_up()
        if slots is None:
            total.mul_(factor)
        else:
            for piece in self._pieces:
                if piece.slot in slots:
                    part(total, piece).mul_(factor)
        self._square_sum = None

    def changing(self, piece: Piece) -> Tensor:
        """A piece of the gradient, to be changed in place."""
        self._square_sum = None
        return part(self.value, piece)

    def zero(self, slot: int) -> None:
        """Zeroes one parameter's gradient, by index in the flat."""
        for piece in self._pieces:
            if piece.slot == slot:
                part(self.value, piece).zero_()
        self._square_sum = None

    def empty(self) -> None:
        """Forgets the gradient, because it was used or is not wanted."""
        self._in_slot = self.is_sum = False
        self._square_sum = None

    def square_sum(self, counted: slice) -> float:
        """The sum of squares of a part, the same part in every call. Computed again only after a change."""
        if self._square_sum is None:
            self._square_sum = self._pool.square_sum(self.value[counted])
        return self._square_sum

    def _add_slot_up(self) -> Tensor:
        """Moves the slot's gradient into the sum. Returns the sum's buffer."""
        total = self._buffers.total()
        if self._in_slot:
            self._pool.accumulate(total, self.slot, first=not self.is_sum)
            self._in_slot, self.is_sum = False, True
        return total


class Transfer:
    """Copies and updates of one flat."""

    def __init__(
        self, label: str, pipeline: Pipeline, buffers: HostBuffers, keys: Mapping[Piece, int], counted: slice
    ) -> None:
        self.label, self.pipeline, self.buffers = label, pipeline, buffers
        self.pieces, self._counted = tuple(keys), counted
        self.gradient = HostGradient(buffers, self.pieces, pipeline.pool)
        self.segments = SegmentCache(buffers, keys, pipeline.pool)
        self.target: Tensor | None = None
        """Where published parameters go on the device. None: parameters rest on the host."""
        self.landing: dict[int, Tensor] = {}
        """Gradients on the device that wait to be copied, by ``id``."""
        self.sent: torch.cuda.Event | None = None
        """The end of the last copy of parameters to the device."""
        self._last_landing = 0
        self._last_update = 0
        self._high_half: Staging | None = None

    @property
    def reads_back(self) -> bool:
        """Whether the high half of the master exists only as the parameters on the device."""
        return self.buffers.split and self.buffers.high is None

    # -- on the training thread -----------------------------------------------------------------------------------

    def publish_to(self, target: Tensor) -> None:
        """Parameters rest on the device, at ``target``."""
        self.target = target
        if target.is_cuda:
            # A model may be freed while its last update is still being copied to the device. Nobody refers to the
            # memory or waits then, so the allocator must know which streams use it.
            for stream in self.pipeline.streams.values():
                assert stream is not None
                target.record_stream(stream)

    def receive(self, gradient: Tensor, publication: SentParameters | None, *, first: bool) -> Tensor | None:
        """Asks for a copy of an averaged gradient to the host. ``publication``: a held update to publish before that.

        Returns the gradient's norm, if a step will ask for it and this is the ``first`` micro-batch.
        """
        pipeline, wide = self.pipeline, gradient.dtype is not self.buffers.dtype
        if wide or not first:
            pipeline.expect_sums()
        norm = None
        if pipeline.norms and first and not wide:
            norm = compat.norms([gradient[self._counted]], torch.float64)[0]
        produced, updated = pipeline.now(), self._last_update
        pipeline.count(trace.DOWN, gradient.nbytes)
        self._count_publication(publication)
        self._admit(gradient, lambda: self._land(gradient, produced, updated, publication))
        return norm

    def receive_and_update(self, gradient: Tensor, rules: dict[int, Rule], publication: SentParameters) -> None:
        """Asks for a copy of a gradient into a buffer of the ring, and for the update right after the copy."""
        pipeline = self.pipeline
        update = Update(self, rules, [(pipeline.unscaled, ())], pipeline.now(), publication)
        pipeline.count(trace.DOWN, gradient.nbytes)
        self._count_update(publication)
        with pipeline.failing_together():
            self._admit(gradient, lambda: self._land_and_update(gradient, update))

    def change(self, change: Callable[[HostGradient], None]) -> None:
        """Changes the gradient on the host, after the copies that were asked for before."""
        self._last_landing = self.pipeline.mover.submit(lambda: change(self.gradient))

    def scale(self, factors: Sequence[tuple[Tensor | None, list[int]]]) -> None:
        """Multiplies the gradient on the host: by one factor, or by several, each for some parameters."""
        self.pipeline.expect_sums()
        later = [(HostFactor(factor), slots if len(factors) > 1 else None) for factor, slots in factors]

        def scale(gradient: HostGradient) -> None:
            for factor, slots in later:
                gradient.scale(factor.read(), slots)

        self.change(scale)

    def landed(self) -> HostGradient:
        """The gradient on the host. Waits for it, and for the changes that were asked for before."""
        mover, waits = self.pipeline.mover, self.pipeline.waits
        began = None if mover.has_done(self._last_landing) else waits.begin()
        mover.wait(self._last_landing)
        if began is not None:
            waits.end(Cause.GRADIENT_COPIES, began)
        return self.gradient

    def square_sum(self) -> float:
        """The sum of squares of the part that counts for norms. Waits for the gradient."""
        return self.landed().square_sum(self._counted)

    def update(self, update: Update) -> None:
        """Updates with the gradient on the host."""
        self._count_update(update.publication)
        update.landed = self._last_landing
        self._last_update = self.pipeline.update(update)

    def publish_held(self, publication: SentParameters) -> None:
        """Publishes a held update without waiting for a gradient."""
        free, updated = self.pipeline.now(), self._last_update
        self._count_publication(publication)
        self._last_landing = self.pipeline.mover.submit(lambda: self._send_held(publication, free, updated))

    def _admit(self, gradient: Tensor, land: Callable[[], None]) -> None:
        """Waits until one more gradient may wait on the device. Then gives the mover the job ``land``."""
        self.pipeline.admit()
        try:
            self.landing[id(gradient)] = gradient
            self._last_landing = self.pipeline.mover.submit(land)
        except BaseException:
            self._admit_another(gradient)
            raise

    def _count_update(self, publication: SentParameters | None) -> None:
        if self.reads_back:
            self.pipeline.count(trace.DOWN, self.buffers.parameter_bytes)
        self._count_publication(publication)

    def _count_publication(self, publication: SentParameters | None) -> None:
        if publication is not None and self.target is not None:
            self.pipeline.count(trace.UP, self.buffers.parameter_bytes)

    # -- on the mover ---------------------------------------------------------------------------------------------

    def _land(
        self, gradient: Tensor, produced: torch.cuda.Event | None, updated: int, publication: SentParameters | None
    ) -> None:
        pipeline, found = self.pipeline, self.gradient
        pipeline.updater.wait(updated)  # the last update may still read the slot
        if publication is not None:
            self._send_held(publication, produced, updated)
        if gradient.dtype is not self.buffers.dtype:
            found.add(self._fetch_wide(gradient, produced))
            return
        found.make_room()
        wait_for_events(pipeline.copy(trace.DOWN, gradient, found.slot, self.label, produced, self.sent))
        self._admit_another(gradient)
        found.arrive()
        if found.is_sum and pipeline.norms:
            found.square_sum(self._counted)  # computed now, during backward, so that step() need not wait

    def _land_and_update(self, gradient: Tensor, update: Update) -> None:
        pipeline, buffers, produced = self.pipeline, self.buffers, update.free
        staging = update.staging = pipeline.gradient_ring.acquire(buffers.dtype, buffers.numel)
        if self.reads_back:
            update.high = self._read_back(produced)
        if gradient.dtype is buffers.dtype:
            after = (produced, staging.free_after)
            wait_for_events(pipeline.copy(trace.DOWN, gradient, staging.tensor, self.label, *after))
            self._admit_another(gradient)
        else:
            update.wide_gradient = self._fetch_wide(gradient, produced)
            wait_for_events(staging.free_after)
        self._last_update = pipeline.update(update)

    def _fetch_wide(self, gradient: Tensor, produced: torch.cuda.Event | None) -> Tensor:
        """Copies a gradient that was already added up on the device. That is rare, so the memory need not be pinned."""
        with self.pipeline.on_stream(trace.DOWN, produced):
            values = gradient.cpu()
        self._admit_another(gradient)
        return values

    def _admit_another(self, gradient: Tensor) -> None:
        self.landing.pop(id(gradient), None)
        self.pipeline.room.release()

    def _send_held(self, publication: SentParameters, free: torch.cuda.Event | None, updated: int) -> None:
        self.pipeline.updater.wait(updated)
        self.send(self.buffers.output(self.gradient.slot), publication, free)

    # -- on the updater, or on the mover ---------------------------------------------------------------------------

    def take_high_half(self, free: torch.cuda.Event | None) -> Staging:
        """The high half of the master, read back from the device. The copy may still be running."""
        high, self._high_half = self._high_half, None
        return high or self._read_back(free)

    def read_ahead(self, free: torch.cuda.Event | None) -> None:
        """Starts reading the high half that ``take_high_half`` will be asked for next."""
        self._high_half = self._read_back(free)

    def _read_back(self, free: torch.cuda.Event | None) -> Staging:
        assert self.target is not None
        staging = self.pipeline.high_ring.acquire(self.buffers.dtype, self.buffers.numel)
        after = (free, staging.free_after, self.sent)
        staging.arrival = self.pipeline.copy(trace.DOWN, self.target, staging.tensor, self.label, *after)
        return staging

    def send(
        self, source: Tensor, publication: SentParameters, free: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Starts the copy of new parameters to where parameters rest. Returns the event of the copy's end."""
        with compat.label("zeroshard.host_publish", self.label):
            arrival, resting = None, self.buffers.resting
            if self.target is not None:
                arrival = self.sent = self.pipeline.copy(trace.UP, source, self.target, self.label, free)
            elif resting is not None and resting is not source:
                wait_for_events(free)
                resting.copy_(source)
            publication.send(arrival)
            return arrival
