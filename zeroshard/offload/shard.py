"""The host's side of one flat: its buffers, and what is under way with them."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch
from torch import Tensor

from ..system import compat, trace
from .kernel import Batch, Rule
from .landed import LandedGradient
from .pipeline import Factor, Pipeline, Publication
from .ring import Ring, Staging
from .states import HostStates, join, remainder, round_to
from .tables import Tables


class HostShard:
    """The host's side of one flat: its buffers, and what is under way with them.

    Sections say which thread runs them: the training or autograd thread, the mover, or the updater.
    """

    def __init__(self, pipeline: Pipeline, states: HostStates, label: str) -> None:
        self.states, self.label = states, label
        self._pipeline = pipeline
        pipeline.states.append(states)
        self.received = 0
        """Micro-batches whose gradients came since the last step."""
        self.held = False
        """A delayed update is there that nobody has published."""
        self.updated_early = False
        """Already updated in this step's backward."""
        self._landing: dict[int, Tensor] = {}
        self._target: Tensor | None = None
        self._norm: Tensor | None = None
        self._norm_part = slice(None)
        self._last_landing = 0
        self._last_update = 0
        self._sent: torch.cuda.Event | None = None
        self.landed = LandedGradient(states, pipeline.pool)
        self.tables = Tables(states, pipeline.pool)

    @property
    def landing(self) -> list[Tensor]:
        """Gradients on the device that wait to be copied."""
        return list(self._landing.values())

    # -- values ---------------------------------------------------------------------------------------------------

    def rest_at(self, target: Tensor | None, norm_part: slice) -> None:
        """Where published parameters go (None: they rest here), and which part of the gradient counts for the norm."""
        self._target, self._norm_part = target, norm_part
        if target is not None and target.is_cuda:
            # Who frees the model may do so while the last update is still on its way into it: no one is left then to
            # hold it or wait, so the allocator must know.
            for stream in (self._pipeline.up, self._pipeline.down):
                assert stream is not None
                target.record_stream(stream)

    def adopt(self, values: Tensor) -> None:
        """Takes values as the master's. Rounded where they are: a device does that faster."""
        self._pipeline.settle()
        self.held = False  # what was adopted is the newest
        states = self.states
        parameter = round_to(values, states.dtype) if states.trained else values
        if states.trained:
            states.stored.copy_(remainder(values) if states.split else values)
        for buffer in (states.high, states.resting, self._target if self.reads_back else None):
            if buffer is not None:
                buffer.copy_(parameter)

    @property
    def reads_back(self) -> bool:
        """Whether the high half of the master is nowhere but in the parameters on the device."""
        return self.states.split and self.states.high is None

    def master(self) -> Tensor:
        """The fp32 values of the master, on the CPU; a copy where it is split."""
        self._pipeline.settle()
        states = self.states
        if not states.split:
            return states.stored
        high = states.high
        if high is None:
            assert self._target is not None
            high = self._target.cpu()
        return join(high, states.stored)

    def shown(self) -> Tensor:
        """The parameters where they rest: while a delayed update is held, those from before it."""
        self._pipeline.settle()
        shown = self.states.resting if self._target is None else self._target
        assert shown is not None
        return shown

    def hold(self, values: Tensor) -> None:
        """Takes values as what a delayed update has made of the master, and shows nothing of it yet."""
        self._pipeline.settle()
        states = self.states
        assert states.slot is not None
        states.stored.copy_(remainder(values) if states.split else values)
        output = self.output(states.slot)
        if output is not states.stored:
            output.copy_(round_to(values, states.dtype))
        self.held = True

    def publish_all(self) -> Publication:
        """Sends the master's present values to where parameters rest."""
        source = round_to(self.master(), self.states.dtype)
        self.held = False
        if self.states.resting is not None:
            self.states.resting.copy_(source)
        if self._target is not None:
            self._target.copy_(source)
        publication = self.new_publication()
        publication.send(self._pipeline.now())
        return publication

    def new_publication(self) -> Publication:
        return Publication(self._pipeline)

    def copy_resting_to(self, target: Tensor) -> None:
        """Brings parameters that rest on the host to the device, on the current stream."""
        assert self.states.resting is not None
        self._pipeline.count(trace.UP, target.nbytes)
        with trace.on_stream(trace.UP, self.label):
            target.copy_(self.states.resting, non_blocking=True)

    # -- gradients ------------------------------------------------------------------------------------------------

    def receive(self, gradient: Tensor, publication: Publication | None = None) -> None:
        """Takes an averaged gradient from the device; with it goes what a delayed update has made."""
        self.check_not_updated()
        pipeline, wide = self._pipeline, gradient.dtype is not self.states.dtype
        if self.received or wide:
            pipeline.expect_sums()
        norm = None
        if pipeline.norms and not self.received and not wide:
            norm = compat.norms([gradient[self._norm_part]], torch.float64)[0]
        produced, updated = pipeline.now(), self._last_update
        pipeline.count(trace.DOWN, gradient.nbytes)
        self._count_publication(publication)
        self._last_landing = self._admit(gradient, lambda: self._land(gradient, produced, updated, publication))
        self.received, self._norm = self.received + 1, norm

    def _admit(self, gradient: Tensor, land: Callable[[], None]) -> int:
        """Has the mover land a gradient when there is room for it to wait."""
        self._pipeline.admit()
        try:
            self._landing[id(gradient)] = gradient
            return self._pipeline.mover.submit(land)
        except BaseException:
            self._admit_another(gradient)
            raise

    def publish_held(self, publication: Publication) -> None:
        """Publishes a delayed update whose unit got no gradient."""
        over, updated = self._pipeline.now(), self._last_update
        self._count_publication(publication)
        self._last_landing = self._pipeline.mover.submit(lambda: self._publish_held(publication, over, updated))

    def norm(self) -> Tensor | float | None:
        """The 2-norm of the gradient's part that counts; None if there is none."""
        if not self.received:
            return None
        if self.updates_early:
            raise RuntimeError(
                "offload.update_in_backward has updated before the norm of all gradients is known, so there is nothing "
                "left to clip; leave clip_grad_norm_() or the option out"
            )
        if self.received == 1 and self._norm is not None:
            return self._norm
        self._pipeline.mover.wait(self._last_landing)
        return float(self.landed.square_sum(self._norm_part) ** 0.5)

    def rescale(self, factor: Tensor) -> None:
        """Multiplies what has been received: more micro-batches will come, which the factor is not for."""
        self._pipeline.expect_sums()
        factor_read = Factor(factor)

        self._norm = None
        self._last_landing = self._pipeline.mover.submit(lambda: self.landed.scale(factor_read.read()))

    def discard(self, slots: set[int] | None) -> None:
        """Zeroes the gradients of some parameters, or forgets all of them."""
        self.check_not_updated()
        if slots is None:
            self.forget()
        elif self.received:
            self._norm = None
            self._last_landing = self._pipeline.mover.submit(lambda: self.landed.zero(slots))

    def forget(self) -> None:
        """Drops what was received and not updated with."""
        self.check_not_updated()
        if self.received:
            self._last_landing = self._pipeline.mover.submit(self.landed.empty)
        self.received, self._norm = 0, None

    def acknowledge(self) -> None:
        """The step whose backward has updated already has come."""
        self.received, self._norm, self.updated_early = 0, None, False

    @property
    def updates_early(self) -> bool:
        """Whether updates are made in backward."""
        return self._pipeline.options.update_in_backward

    def check_not_updated(self, stashed: bool = False) -> None:
        """Raises where the step's one backward has run already: the flat was updated, or waits for the step."""
        if self.updated_early or stashed:
            raise RuntimeError(
                f"offload.update_in_backward: {self.label!r} has had its one backward of this step, so its gradient "
                "can be neither dropped nor added to; call step() once after every backward, or leave the option out"
            )

    # -- update ---------------------------------------------------------------------------------------------------

    def update(
        self,
        rules: dict[int, Rule],
        factor: Factor,
        over: torch.cuda.Event | None,
        publication: Publication | None,
        following: HostShard | None = None,
    ) -> None:
        """Updates the given parameters' pieces, and publishes unless that is to be delayed.

        ``over`` is when the device no longer reads the old parameters; ``following`` is who will be updated next.
        """
        self.held = publication is None
        self.acknowledge()
        self._count_update(publication)
        task = _Update(self, rules, factor, over, publication, landed=self._last_landing, following=following)
        self._last_update = self._pipeline.update(task)

    def update_early(self, gradient: Tensor, rules: dict[int, Rule], publication: Publication) -> None:
        """Lands a gradient and updates with it at once."""
        self.check_not_updated()
        pipeline = self._pipeline
        produced = pipeline.now()
        pipeline.count(trace.DOWN, gradient.nbytes)
        self._count_update(publication)

        def land() -> None:
            assert pipeline.ring is not None
            place = pipeline.ring.acquire(self.states.dtype, self.states.numel)
            high = None if pipeline.staging is None else self.read_back(pipeline.staging, produced)
            task = _Update(self, rules, pipeline.unscaled, produced, publication, place=place, high=high)
            if gradient.dtype is self.states.dtype:
                pipeline.down_from(gradient, place.tensor, self.label, produced, place.free_after)
            else:  # it came in parts, which were added up on the device: rare, so pageable memory will do
                with pipeline.on_stream(pipeline.down, produced):
                    task.wide_gradient = gradient.cpu()
                if place.free_after is not None:
                    place.free_after.synchronize()
            self._admit_another(gradient)
            self._last_update = pipeline.update(task)

        with pipeline.failing_together():
            self._last_landing = self._admit(gradient, land)
        self.received, self.updated_early = 1, True

    def _count_update(self, publication: Publication | None) -> None:
        if self.reads_back:
            self._pipeline.count(trace.DOWN, self._parameter_bytes)
        self._count_publication(publication)

    def _count_publication(self, publication: Publication | None) -> None:
        if publication is not None and self._target is not None:
            self._pipeline.count(trace.UP, self._parameter_bytes)

    @property
    def _parameter_bytes(self) -> int:
        return self.states.numel * self.states.dtype.itemsize

    # -- on the mover ---------------------------------------------------------------------------------------------

    def _land(
        self, gradient: Tensor, produced: torch.cuda.Event | None, updated: int, publication: Publication | None
    ) -> None:
        pipeline = self._pipeline
        pipeline.updater.wait(updated)  # the last update may still read the slot
        if publication is not None:
            self._publish_held(publication, produced, updated)
        if gradient.dtype is not self.states.dtype:
            # Several micro-batches were added up on the device already: rare, so pageable memory will do.
            with pipeline.on_stream(pipeline.down, produced):
                values = gradient.cpu()
            self._admit_another(gradient)
            self.landed.add(values)
            return
        several = self.landed.make_room()
        pipeline.down_from(gradient, self.landed.slot, self.label, produced, self._sent)
        self._admit_another(gradient)
        self.landed.arrive(several)
        if several and pipeline.norms:
            self.landed.square_sum(self._norm_part)  # now, beside backward, rather than when it is asked for

    def _admit_another(self, gradient: Tensor) -> None:
        self._landing.pop(id(gradient), None)
        self._pipeline.room.release()

    def _publish_held(self, publication: Publication, over: torch.cuda.Event | None, updated: int) -> None:
        self._pipeline.updater.wait(updated)
        assert self.states.slot is not None
        self.publish(self.output(self.states.slot), publication, over)

    # -- on the updater -------------------------------------------------------------------------------------------

    def read_back(self, staging: Ring, over: torch.cuda.Event | None) -> Staging:
        """Starts reading the high half of the master from the device."""
        assert self._target is not None
        place = staging.acquire(self.states.dtype, self.states.numel)
        after = (over, place.free_after, self._sent)
        place.arrival = self._pipeline.start_down(self._target, place.tensor, self.label, *after)
        return place

    def wait_for_inputs(
        self, landed: int, over: torch.cuda.Event | None, following: HostShard | None
    ) -> Staging | None:
        """Until the gradient has landed; starts reading back the high half, also of who is next."""
        self._pipeline.mover.wait(landed)
        staging = self._pipeline.staging
        if staging is None:
            return None
        high = staging.take(self) or self.read_back(staging, over)
        if following is not None:
            staging.put(following, following.read_back(staging, over))
        return high

    def wait_for_outputs(self, over: torch.cuda.Event | None) -> None:
        """Until no copy reads what an update is about to write."""
        for event in (self._sent, over if self.states.resting is not None else None):
            if event is not None:
                event.synchronize()

    def output(self, gradient: Tensor) -> Tensor:
        """Where the new parameters are after an update, but for a high half that was read back."""
        slot = gradient if self.states.slot is None else self.states.slot
        output = self.states.output(slot)
        return self.states.stored if output is None else output

    def complete(self, output: Tensor, updated: Container[int]) -> None:
        """All of an output is published, also of parameters that no update wrote: there it holds their gradients."""
        states = self.states
        if output is states.stored or states.split:
            return
        for piece in states.pieces:
            if piece.slot not in updated:
                states.part(output, piece).copy_(round_to(states.part(states.stored, piece), states.dtype))

    def publish(
        self, source: Tensor, publication: Publication, over: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        with compat.label(f"zeroshard.host_publish {self.label}"):
            arrival = None
            if self._target is not None:
                arrival = self._sent = self._pipeline.start_up(source, self._target, self.label, over)
            elif self.states.resting is not None and self.states.resting is not source:
                if over is not None:
                    over.synchronize()
                self.states.resting.copy_(source)
            publication.send(arrival)
            return arrival


class _Update:
    """One update of a flat: of its slot or its sum, or of a buffer of the ring that its gradient has landed in."""

    def __init__(
        self,
        shard: HostShard,
        rules: dict[int, Rule],
        factor: Factor,
        over: torch.cuda.Event | None,
        publication: Publication | None,
        *,
        landed: int = 0,
        following: HostShard | None = None,
        place: Staging | None = None,
        high: Staging | None = None,
    ) -> None:
        self.label, self.numel, self.factor = shard.label, shard.states.numel, factor
        self._shard, self._rules, self._over, self._publication = shard, rules, over, publication
        self._last_landing, self._following, self._place, self._high = landed, following, place, high
        self._output: Tensor | None = None
        self.wide_gradient: Tensor | None = None
        """In more precision than a buffer of the ring has."""

    def prepare(self) -> tuple[Batch, Sequence[Rule]]:
        """Waits for what the update reads, and for copies that still read what it writes."""
        shard, place = self._shard, self._place
        if place is None:
            self._high = shard.wait_for_inputs(self._last_landing, self._over, self._following)
        shard.wait_for_outputs(self._over)
        if self._high is not None:
            self._high.wait()
        gradient = shard.landed.value if place is None else place.tensor
        self._output = shard.output(gradient) if self._high is None else self._high.tensor
        batch, slots = shard.tables.find(gradient, self._output, tuple(sorted(self._rules)), self.wide_gradient)
        return batch, [self._rules[slot] for slot in slots]

    def finish(self) -> None:
        """Publishes, and gives the buffers back."""
        assert self._output is not None
        self._shard.complete(self._output, self._rules)
        sent = None
        if self._place is None:
            self._shard.landed.empty()
        if self._publication is not None:
            sent = self._shard.publish(self._output, self._publication, self._over)
        for place in (self._place, self._high):
            if place is not None:
                place.release(sent)
