"""One flat's copies between host and device and its updates, as the mover and the updater thread run them.

The first section is for the training thread, which asks for things and does not wait. The other sections say which
thread runs them (``pipeline.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor

from ..config.layout import Piece
from ..system import compat, trace
from .host_buffers import HostBuffers, part, round_to
from .host_gradient import HostGradient
from .kernel import Rule
from .pinned import Ring, Staging
from .pipeline import Factor, Pipeline, SentParameters
from .update import Tables, Update


class Transfer:
    """Copies and updates of one flat."""

    def __init__(
        self, label: str, pipeline: Pipeline, buffers: HostBuffers, keys: Mapping[Piece, int], counted: slice
    ) -> None:
        self.label, self.buffers, self._pipeline = label, buffers, pipeline
        self._pieces, self._counted = tuple(keys), counted
        self.gradient = HostGradient(buffers, self._pieces, pipeline.pool)
        self.tables = Tables(buffers, keys, pipeline.pool)
        self.target: Tensor | None = None
        """Where published parameters go on the device. None: they rest on the host."""
        self._landing: dict[int, Tensor] = {}
        self._last_landing = 0
        self._last_update = 0
        self._sent: torch.cuda.Event | None = None

    # -- asked by the training thread -----------------------------------------------------------------------------

    @property
    def landing(self) -> list[Tensor]:
        """Gradients on the device that wait to be copied."""
        return list(self._landing.values())

    @property
    def reads_back(self) -> bool:
        """Whether the high half of the master is nowhere but in the parameters on the device."""
        return self.buffers.split and self.buffers.high is None

    def publish_to(self, target: Tensor) -> None:
        """Parameters rest on the device, at ``target``."""
        self.target = target
        if target.is_cuda:
            # Who frees the model may do so while the last update is still on its way into it: no one is left then to
            # hold it or wait, so the allocator must know.
            for stream in (self._pipeline.up, self._pipeline.down):
                assert stream is not None
                target.record_stream(stream)

    def receive(self, gradient: Tensor, publication: SentParameters | None, *, first: bool) -> Tensor | None:
        """Has an averaged gradient copied to the host. ``publication``: a delayed update to publish on the way.

        Returns the gradient's norm, if a step will ask for it and this is the ``first`` micro-batch.
        """
        pipeline, wide = self._pipeline, gradient.dtype is not self.buffers.dtype
        if wide or not first:
            pipeline.expect_sums()
        norm = None
        if pipeline.norms and first and not wide:
            norm = compat.norms([gradient[self._counted]], torch.float64)[0]
        produced, updated = pipeline.now(), self._last_update
        pipeline.count(trace.DOWN, gradient.nbytes)
        self._count_publication(publication)
        self._last_landing = self._admit(gradient, lambda: self._land(gradient, produced, updated, publication))
        return norm

    def receive_and_update(self, gradient: Tensor, rules: dict[int, Rule], publication: SentParameters) -> None:
        """Has a gradient copied into a buffer of the ring, and updates with it at once."""
        pipeline = self._pipeline
        produced = pipeline.now()
        pipeline.count(trace.DOWN, gradient.nbytes)
        self._count_update(publication)

        def land() -> None:
            assert pipeline.ring is not None
            staging = pipeline.ring.acquire(self.buffers.dtype, self.buffers.numel)
            high = None if pipeline.staging is None else self.read_back(pipeline.staging, produced)
            task = Update(self, rules, pipeline.unscaled, produced, publication, staging=staging, high=high)
            if gradient.dtype is self.buffers.dtype:
                pipeline.down_from(gradient, staging.tensor, self.label, produced, staging.free_after)
            else:  # it came in parts, which were added up on the device: rare, so pageable memory will do
                with pipeline.on_stream(pipeline.down, produced):
                    task.wide_gradient = gradient.cpu()
                if staging.free_after is not None:
                    staging.free_after.synchronize()
            self._admit_another(gradient)
            self._last_update = pipeline.update(task)

        with pipeline.failing_together():
            self._last_landing = self._admit(gradient, land)

    def change(self, change: Callable[[HostGradient], None]) -> None:
        """Changes the gradient on the host, after the copies that were asked for before."""
        self._last_landing = self._pipeline.mover.submit(lambda: change(self.gradient))

    def scale(self, factor: Tensor) -> None:
        """Multiplies the gradient on the host."""
        self._pipeline.expect_sums()
        factor_read = Factor(factor)
        self.change(lambda gradient: gradient.scale(factor_read.read()))

    def square_sum(self) -> float:
        """The sum of squares of the part that counts for norms. Waits for the gradient."""
        self._pipeline.mover.wait(self._last_landing)
        return self.gradient.square_sum(self._counted)

    def update(
        self,
        rules: dict[int, Rule],
        factor: Factor,
        free: torch.cuda.Event | None,
        publication: SentParameters | None,
        following: Transfer | None,
    ) -> None:
        """Updates with the gradient on the host, and publishes unless that is to be delayed.

        ``free`` is when the device no longer reads the old parameters. ``following`` will be updated next.
        """
        self._count_update(publication)
        task = Update(self, rules, factor, free, publication, landed=self._last_landing, following=following)
        self._last_update = self._pipeline.update(task)

    def publish_held(self, publication: SentParameters) -> None:
        """Publishes a delayed update without waiting for a gradient."""
        free, updated = self._pipeline.now(), self._last_update
        self._count_publication(publication)
        self._last_landing = self._pipeline.mover.submit(lambda: self._send_held(publication, free, updated))

    def _admit(self, gradient: Tensor, land: Callable[[], None]) -> int:
        """Has the mover copy a gradient when there is room for it to wait."""
        self._pipeline.admit()
        try:
            self._landing[id(gradient)] = gradient
            return self._pipeline.mover.submit(land)
        except BaseException:
            self._admit_another(gradient)
            raise

    def _count_update(self, publication: SentParameters | None) -> None:
        if self.reads_back:
            self._pipeline.count(trace.DOWN, self._parameter_bytes)
        self._count_publication(publication)

    def _count_publication(self, publication: SentParameters | None) -> None:
        if publication is not None and self.target is not None:
            self._pipeline.count(trace.UP, self._parameter_bytes)

    @property
    def _parameter_bytes(self) -> int:
        return self.buffers.numel * self.buffers.dtype.itemsize

    # -- on the mover ---------------------------------------------------------------------------------------------

    def _land(
        self, gradient: Tensor, produced: torch.cuda.Event | None, updated: int, publication: SentParameters | None
    ) -> None:
        pipeline = self._pipeline
        pipeline.updater.wait(updated)  # the last update may still read the slot
        if publication is not None:
            self._send_held(publication, produced, updated)
        if gradient.dtype is not self.buffers.dtype:
            # Several micro-batches were added up on the device already: rare, so pageable memory will do.
            with pipeline.on_stream(pipeline.down, produced):
                values = gradient.cpu()
            self._admit_another(gradient)
            self.gradient.add(values)
            return
        several = self.gradient.make_room()
        pipeline.down_from(gradient, self.gradient.slot, self.label, produced, self._sent)
        self._admit_another(gradient)
        self.gradient.arrive(several)
        if several and pipeline.norms:
            self.gradient.square_sum(self._counted)  # now, beside backward, rather than when it is asked for

    def _admit_another(self, gradient: Tensor) -> None:
        self._landing.pop(id(gradient), None)
        self._pipeline.room.release()

    def _send_held(self, publication: SentParameters, free: torch.cuda.Event | None, updated: int) -> None:
        self._pipeline.updater.wait(updated)
        assert self.buffers.slot is not None
        self.send(self.output(self.buffers.slot), publication, free)

    # -- on the updater -------------------------------------------------------------------------------------------

    def read_back(self, ring: Ring, free: torch.cuda.Event | None) -> Staging:
        """Starts reading the high half of the master from the device."""
        assert self.target is not None
        staging = ring.acquire(self.buffers.dtype, self.buffers.numel)
        after = (free, staging.free_after, self._sent)
        staging.arrival = self._pipeline.start_down(self.target, staging.tensor, self.label, *after)
        return staging

    def wait_for_inputs(self, landed: int, free: torch.cuda.Event | None, following: Transfer | None) -> Staging | None:
        """Waits for the gradient. Starts reading back the high half, also of the home that is updated next."""
        self._pipeline.mover.wait(landed)
        ring = self._pipeline.staging
        if ring is None:
            return None
        high = ring.take(self) or self.read_back(ring, free)
        if following is not None:
            ring.put(following, following.read_back(ring, free))
        return high

    def wait_for_outputs(self, free: torch.cuda.Event | None) -> None:
        """Waits until no copy reads what an update is about to write."""
        for event in (self._sent, free if self.buffers.resting is not None else None):
            if event is not None:
                event.synchronize()

    def output(self, gradient: Tensor) -> Tensor:
        """Where the new parameters are after an update, unless their high half was read back."""
        slot = gradient if self.buffers.slot is None else self.buffers.slot
        output = self.buffers.output(slot)
        return self.buffers.stored if output is None else output

    def complete(self, output: Tensor, updated: Container[int]) -> None:
        """Fills the output where no parameter was updated: it still holds gradients there, and is published whole."""
        buffers = self.buffers
        if output is buffers.stored or buffers.split:
            return
        for piece in self._pieces:
            if piece.slot not in updated:
                part(output, piece).copy_(round_to(part(buffers.stored, piece), buffers.dtype))

    def send(
        self, source: Tensor, publication: SentParameters, free: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Starts the copy of new parameters to where parameters rest; the event tells when it is over."""
        with compat.label(f"zeroshard.host_publish {self.label}"):
            arrival, resting = None, self.buffers.resting
            if self.target is not None:
                arrival = self._sent = self._pipeline.start_up(source, self.target, self.label, free)
            elif resting is not None and resting is not source:
                if free is not None:
                    free.synchronize()
                resting.copy_(source)
            publication.send(arrival)
            return arrival
