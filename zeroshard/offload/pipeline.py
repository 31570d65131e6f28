"""The host's side of a step: gradients land, states are updated, parameters are published.

Two threads do the work, each in the order in which it was asked. The *mover* copies a gradient from the device into
host memory, and adds it to the sum if there are several micro-batches. The *updater* runs the kernel, and starts the
copy of new parameters as soon as they are made. Neither thread issues a collective. The training thread only asks, and
waits where it needs a result. The way of one gradient:

    training thread          mover                updater                       training thread
    HostHome.take()     →    copy to the slot     update, start to publish  →   SentParameters.wait()
    in backward              Transfer._land       Update.prepare, finish        in the next forward

With ``update_in_backward`` the mover asks for the update itself, as soon as the gradient has landed. Elsewhere
``step()`` asks for it. The mover publishes a delayed update, just before the unit's next gradient lands: from then on
the device does not need the old parameters.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config.offload import Offload
from ..system import compat, machine, trace
from ..system.cores import share
from ..system.sizes import size_text
from ..system.waits import Cause, Waits
from .dry import DryPool, DryWorker
from .host_buffers import HostBuffers, HostBytes
from .kernel import Pool, Segments
from .pinned import BufferRing, HostBlock, aligned
from .rules import Rule
from .worker import POLL_SECONDS, Worker

if TYPE_CHECKING:
    from .update import Update

LANDING = 3
"""Gradients that wait on the device to be copied, at most. Bounds their memory (C_B)."""
RING = 4
"""Buffers for gradients with ``update_in_backward``: one lands, one is updated, the others are being sent."""
HIGH_HALVES = 3
"""Buffers for parameters that are read back: one arrives, one is updated, one is being sent."""
GROUP_ELEMENTS = 96 << 20
"""Elements that are updated in one call, at most. A flat with more elements is updated alone."""
DRIVER_CORES = 4
"""With this many cores or more, one core is left to the training thread.

Of 16 cores, 15 threads updated faster than 16 while the training thread was running.
"""
CROWDED_CORES = 8
"""With this many cores or more, three cores are left free if the host updates during backward.

The training thread launches kernels, the mover copies and the updater sends. Of 16 cores, 13 threads gave shorter steps
than 15 (benchmarks/RESULTS.md).
"""


def wait_for_events(*events: torch.cuda.Event | None) -> None:
    """The calling thread waits for points in the device's work. None stands for no device."""
    for event in events:
        if event is not None:
            event.synchronize()


class SentParameters:
    """New parameters of a flat on their way to where parameters rest (``states.home.Publication``)."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._workers, self._device = (pipeline.mover, pipeline.updater), pipeline.device
        self._waits = pipeline.waits
        self._sent = threading.Event()
        self._arrival: torch.cuda.Event | None = None

    @property
    def sent(self) -> bool:
        """Whether ``wait`` would return without waiting on the host."""
        return self._sent.is_set()

    def send(self, arrival: torch.cuda.Event | None) -> None:
        """Called by the thread that has started the copy. ``arrival`` is the end of the copy."""
        self._arrival = arrival
        self._sent.set()

    def wait(self) -> None:
        """Waits until the copy is started. Later work on the current stream sees the new parameters."""
        if self._sent.is_set():
            self._wait_for_arrival()
            return
        began = self._waits.begin()
        while not self._sent.wait(POLL_SECONDS):
            for worker in self._workers:
                worker.check()
        self._wait_for_arrival()
        self._waits.end(Cause.HOST_UPDATE, began)

    def _wait_for_arrival(self) -> None:
        if self._arrival is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrival)


class HostFactor:
    """The product of a gradient's factors, for the host. The updater reads it, so the training thread does not wait."""

    def __init__(self, value: Tensor | None) -> None:
        self._value = value
        self._arrival: torch.cuda.Event | None = None
        if value is not None and value.is_cuda:
            self._value = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._arrival = torch.cuda.Event(blocking=True)
            self._arrival.record()

    def read(self) -> float:
        wait_for_events(self._arrival)
        return 1.0 if self._value is None or compat.is_fake(self._value) else float(self._value)


@dataclass
class PartNorms:
    """Whether the norm of each parameter's gradient is computed on the device, as the gradient comes.

    That is done if the last step was asked for such norms: nobody then waits for the gradient to reach the host.
    """

    expected: bool = False
    asked: bool = False

    def end_step(self) -> None:
        self.expected, self.asked = self.asked, False


class Pipeline:
    """The two threads, the kernel's pool and the streams of one sharded model."""

    gradient_ring: BufferRing
    """Buffers for gradients, with ``update_in_backward``."""
    high_ring: BufferRing
    """Buffers for parameters that are read back."""

    def __init__(
        self,
        options: Offload,
        device: torch.device,
        *,
        norms: bool,
        local_ranks: int,
        waits: Waits,
        dry: bool = False,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.options, self.device, self.local_ranks, self.dry = options, device, local_ranks, dry
        self.waits = waits
        self.norms = norms
        """Whether a step will ask for the norm of the gradients. It is then computed as they land."""
        self.part_norms = PartNorms()
        self._tell = tell
        self._sums_expected = False
        self._cuda = device.type == "cuda"
        self.pool: Pool
        self.mover: Worker
        self.updater: Worker
        if dry:
            self.pool = DryPool()
            self.mover, self.updater = DryWorker("gradient copy", LANDING), DryWorker("update", 0)
        else:
            use_device = partial(torch.cuda.set_device, device) if self._cuda else None
            self.pool = Pool(options.threads or default_threads(device, during_backward=options.beside_backward))
            self.mover, self.updater = Worker("gradient copy", use_device, tell), Worker("update", use_device, tell)
        self.room = threading.Semaphore(LANDING + dry)
        """How many more gradients may wait on the device."""
        self.streams = {way: torch.cuda.Stream(device) if self._cuda else None for way in (trace.DOWN, trace.UP)}
        """One stream for copies to the host, one for copies to the device."""
        self.unscaled = HostFactor(None)
        """The factor 1, for updates in backward."""
        self.buffers: list[HostBuffers] = []
        """The buffers of all flats whose states live on the host."""
        self.blocks: tuple[HostBlock, ...] = ()
        self._ring_size = RING * options.update_in_backward
        self._high_ring_size = HIGH_HALVES * options.read_back
        self._updates: deque[Update] = deque()
        self._asked = self._begun = 0
        """Elements of all updates that were asked for, and that have begun. Each count is written by one thread."""
        self._traffic = {trace.DOWN: 0, trace.UP: 0}
        self.copies = 0
        """Copies that were asked for so far."""
        trace.wait_for(self)

    # -- memory ---------------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> HostBytes:
        """The memory that ``allocate`` takes."""
        return sum((buffers.bytes for buffers in self.buffers), HostBytes(pinned=self.ring_bytes))

    @property
    def ring_bytes(self) -> int:
        """The memory of the buffers that flats use in turn."""
        return self._largest * (self._ring_size + self._high_ring_size)

    @property
    def _largest(self) -> int:
        return aligned(max((buffers.parameter_bytes for buffers in self.buffers if buffers.trained), default=0))

    def allocate(self) -> None:
        """Takes the host memory of all flats, in two blocks."""
        size = self.bytes
        pinned = HostBlock(size.pinned, pinned=self._cuda, dry=self.dry)
        pageable = HostBlock(size.pageable, pinned=False, dry=self.dry)
        for buffers in self.buffers:
            buffers.bind(pinned, pageable)
        self.gradient_ring = self._new_ring(pinned, self._ring_size)
        self.high_ring = self._new_ring(pinned, self._high_ring_size)
        self.blocks = (pinned, pageable)

    def _new_ring(self, block: HostBlock, count: int) -> BufferRing:
        return BufferRing([block.take(self._largest, torch.uint8) for _ in range(count)], self.updater.check)

    def expect_sums(self) -> None:
        """Called when a second micro-batch comes: raises if there is no memory for sums in fp32."""
        if self._sums_expected:
            return
        needed = 4 * sum(buffers.numel for buffers in self.buffers if buffers.trained)
        available = machine.available_memory() // self.local_ranks
        if self.options.host_memory is not None:
            available = min(available, self.options.host_memory - self.bytes.total)
        if needed > available:
            text = (
                f"offload: adding up micro-batches takes {size_text(needed)} of host memory more, but "
                f"{size_text(max(0, available))} are available; use larger micro-batches and one a step, or "
                "zeroshard.no_sync(model), which adds them up on the device"
            )
            if self._tell is not None:
                self._tell(text)  # other ranks may have enough memory, and would wait for this rank
            raise ValueError(text)
        self._sums_expected = True

    # -- updates --------------------------------------------------------------------------------------------------

    def update(self, update: Update) -> int:
        """Asks the updater to update a flat, after the flats before it. Returns the number of the updater's job."""
        self._asked += update.transfer.buffers.numel
        self._updates.append(update)
        return self.updater.submit(self._update_next)

    def _update_next(self) -> None:
        """Runs the next updates, unless an earlier job ran them together with others."""
        group = self._next_group()
        if not group:
            return
        work: dict[HostFactor, list[tuple[Segments, Sequence[Rule]]]] = {}
        for update in group:
            for factor, segments, rules in update.prepare():
                work.setdefault(factor, []).append((segments, rules))
        names = " ".join(update.transfer.label for update in group)
        with compat.label("zeroshard.host_update", names), trace.on_host(trace.UPDATE, names):
            for factor, members in work.items():
                self.pool.update(members, factor.read(), self.options.seed)
        for update in group:
            update.finish()

    def _next_group(self) -> list[Update]:
        """Flats to update in one call. Fewer calls mean that the kernel's threads wait for each other less often.

        Groups become smaller towards the end of the queue, so that the device gets the last parameters sooner.
        """
        if not self._updates:
            return []
        group = [self._updates.popleft()]
        most = 0 if self.options.read_back else min(GROUP_ELEMENTS, (self._asked - self._begun) // 4)
        elements = group[0].transfer.buffers.numel
        factor = group[0].factor
        while factor is not None and self._updates and self._updates[0].factor is factor:
            elements += self._updates[0].transfer.buffers.numel
            if elements > most:
                break
            group.append(self._updates.popleft())
        self._begun += sum(update.transfer.buffers.numel for update in group)
        return group

    # -- waiting --------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Waits until one more gradient may wait on the device."""
        if self.room.acquire(blocking=False):
            return
        began = self.waits.begin()
        while not self.room.acquire(timeout=POLL_SECONDS):
            self.mover.check()
            self.updater.check()
        self.waits.end(Cause.GRADIENT_COPIES, began)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """If the block fails, both workers fail: other threads may wait for work that was never submitted."""
        try:
            yield
        except BaseException as error:
            self.mover.fail(error)
            self.updater.fail(error)
            raise

    def wait(self) -> None:
        """Waits until the host has nothing to do. Raises if a job has failed."""
        self.mover.wait()
        self.updater.wait()

    def settle(self) -> None:
        """Waits until host and device have nothing to do. Called before a write to memory that copies read."""
        self.wait()
        if self._cuda:
            torch.cuda.synchronize(self.device)

    def now(self) -> torch.cuda.Event | None:
        """The point that the device's work has reached on the current stream."""
        if not self._cuda:
            return None
        event = torch.cuda.Event(blocking=True)  # a busy wait would take a core from the update
        event.record(torch.cuda.current_stream(self.device))
        return event

    # -- copies ---------------------------------------------------------------------------------------------------

    @contextmanager
    def on_stream(self, way: str, *after: torch.cuda.Event | None) -> Iterator[None]:
        """Work on the stream of one direction, after some events."""
        stream = self.streams[way]
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for event in after:
                if event is not None:
                    assert stream is not None
                    stream.wait_event(event)
            yield

    def copy(
        self, way: str, source: Tensor, target: Tensor, label: str, *after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Starts a copy between host and device, after some events. Returns the event of its end."""
        with self.on_stream(way, *after):
            with trace.on_stream(way, label):
                target.copy_(source, non_blocking=True)
            return self.now()

    def count(self, way: str, size: int) -> None:
        """Counts a copy when it is asked for, so that it belongs to the step that asks."""
        self._traffic[way] += size
        self.copies += 1

    def take_traffic(self) -> dict[str, int]:
        """Bytes of the copies in each direction that were asked for since the last call."""
        taken, self._traffic = self._traffic, {trace.DOWN: 0, trace.UP: 0}
        return taken


def default_threads(device: torch.device, *, during_backward: bool = False) -> int:
    """This rank's cores, less the cores that drive a GPU. ``during_backward``: the host updates while backward runs."""
    cores = share().threads
    if device.type != "cuda" or cores < DRIVER_CORES:
        return cores
    return cores - (3 if during_backward and cores >= CROWDED_CORES else 1)
