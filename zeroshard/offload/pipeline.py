"""The host's side of a step: gradients land, states are updated, parameters are published.

Two threads do it, each in the order it was asked. The *mover* copies a gradient from the device into its slot, and adds
it up where there are several micro-batches. The *updater* runs the kernel, and sends new parameters off as soon as
they are made. Neither issues a collective. The training thread only asks, and waits where it needs a result:

    receive() in backward  →  mover: land          →  updater: update, publish  →  SentParameters.wait() in forward

A delayed update is published by the mover instead, when the next gradient of the unit lands: that is when the device
has no more use for the old parameters.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config.offload import Offload
from ..system import compat, machine, trace
from ..system.cores import share
from ..system.sizes import size_text
from .dry import DryPool, DryWorker
from .host_buffers import HostBuffers, HostBytes
from .kernel import Batch, Pool, Rule, run_together
from .pinned import Block, Ring, aligned
from .worker import POLL_SECONDS, Worker

LANDING = 3
"""Gradients that wait on the device to be copied, at most. Bounds their memory (C_B)."""
RING = 4
"""Slots of the ring where gradients are consumed as they land: one lands, one is updated, the others are sent off."""
GROUP_ELEMENTS = 96 << 20
"""Elements that are updated in one call, at most, unless one flat has more."""
DRIVER_CORES = 4
"""From how many cores on one is left to the training thread. Of 16, 15 threads updated faster than 16 beside it."""
CROWDED_CORES = 8
"""From how many on three are, where backward goes on meanwhile: it launches, the mover copies, the updater sends.

Of 16, 13 threads then gave shorter steps than 15 (benchmarks/RESULTS.md).
"""
HIGH_HALVES = 3
"""Staging buffers for parameters that are read back: one arrives, one is updated, one is sent off."""


class SentParameters:
    """New parameters of a flat, on their way to where parameters rest (``states.home.Publication``)."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._workers, self._device = (pipeline.mover, pipeline.updater), pipeline.device
        self._sent = threading.Event()
        self._arrival: torch.cuda.Event | None = None

    @property
    def sent(self) -> bool:
        """Whether a wait would not hold up the host."""
        return self._sent.is_set()

    def send(self, arrival: torch.cuda.Event | None) -> None:
        """By the thread that has started the copy."""
        self._arrival = arrival
        self._sent.set()

    def wait(self) -> None:
        """Until they are sent; then what follows on the current stream sees them."""
        while not self._sent.wait(POLL_SECONDS):
            for worker in self._workers:
                worker.check()
        if self._arrival is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrival)


class Factor:
    """What gradients are multiplied by. Read by the updater, so that the training thread need not wait for it."""

    def __init__(self, value: Tensor | None) -> None:
        self._value = value
        self._arrival: torch.cuda.Event | None = None
        if value is not None and value.is_cuda:
            self._value = torch.empty((), dtype=torch.float32, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._arrival = torch.cuda.Event(blocking=True)
            self._arrival.record()

    def read(self) -> float:
        if self._arrival is not None:
            self._arrival.synchronize()
        return 1.0 if self._value is None or compat.is_fake(self._value) else float(self._value)


class Task(Protocol):
    """One flat's update, to be run by the updater."""

    label: str
    numel: int
    factor: Factor

    def prepare(self) -> tuple[Batch, Sequence[Rule]]:
        """Waits for what the update reads; what is to be run."""

    def finish(self) -> None:
        """After the update: publishes."""


class Pipeline:
    """The two threads, the kernel's pool and the streams of one sharded model."""

    def __init__(
        self,
        options: Offload,
        device: torch.device,
        *,
        norms: bool,
        local_ranks: int,
        dry: bool = False,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.options, self.device, self.local_ranks, self.dry = options, device, local_ranks, dry
        self._sums_expected = False
        self._tell = tell
        self.norms = norms
        """Whether a step will ask for the norm, so that it is found on the way."""
        cuda = device.type == "cuda"
        use_device = partial(torch.cuda.set_device, device) if cuda else None
        self.pool: Pool
        self.mover: Worker
        self.updater: Worker
        if dry:
            self.pool = DryPool()
            self.mover, self.updater = DryWorker("gradient copy", LANDING), DryWorker("update", 0)
        else:
            self.pool = Pool(options.threads or default_threads(device, beside_backward=options.beside_backward))
            self.mover, self.updater = Worker("gradient copy", use_device, tell), Worker("update", use_device, tell)
        self.room = threading.Semaphore(LANDING + dry)
        self.down = torch.cuda.Stream(device) if cuda else None
        self.up = torch.cuda.Stream(device) if cuda else None
        self.blocks: tuple[Block, ...] = ()
        self.unscaled = Factor(None)
        self.ring: Ring | None = None
        self.staging: Ring | None = None
        self.buffers: list[HostBuffers] = []
        """Of all flats whose states live here."""
        self._tasks: deque[Task] = deque()
        self._asked = self._begun = 0
        """Elements of all tasks so far. Each count has one writer: the training thread, and the updater."""
        self._traffic = {trace.DOWN: 0, trace.UP: 0}
        self._copies = 0
        trace.wait_for(self)

    @property
    def bytes(self) -> HostBytes:
        """What ``allocate`` takes."""
        return sum((buffers.bytes for buffers in self.buffers), HostBytes(pinned=self.ring_bytes))

    @property
    def ring_bytes(self) -> int:
        """Of the buffers that flats take turns with."""
        return self._largest * (self._ring_count + self._staging_count)

    @property
    def _largest(self) -> int:
        sizes = [buffers.numel * buffers.dtype.itemsize for buffers in self.buffers if buffers.trained]
        return aligned(max(sizes, default=0))

    @property
    def _ring_count(self) -> int:
        return RING if self.options.update_in_backward else 0

    @property
    def _staging_count(self) -> int:
        return HIGH_HALVES if self.options.read_back else 0

    def allocate(self) -> None:
        """Takes the host memory of all flats, in two blocks."""
        size = self.bytes
        pinned = Block(size.pinned, pinned=self.device.type == "cuda", dry=self.dry)
        pageable = Block(size.pageable, pinned=False, dry=self.dry)
        for buffers in self.buffers:
            buffers.bind(pinned, pageable)
        if self._ring_count:
            self.ring = self._new_ring(pinned, self._ring_count)
        if self._staging_count:
            self.staging = self._new_ring(pinned, self._staging_count)
        self.blocks = (pinned, pageable)

    def _new_ring(self, block: Block, count: int) -> Ring:
        return Ring([block.take(self._largest, torch.uint8) for _ in range(count)], self.updater.check)

    def now(self) -> torch.cuda.Event | None:
        """The point that the device's work has reached on the current stream."""
        if self.down is None:
            return None
        event = torch.cuda.Event(blocking=True)  # a thread that spins on it would take a core from the update
        event.record(torch.cuda.current_stream(self.device))
        return event

    def expect_sums(self) -> None:
        """A second micro-batch comes: there must be room for sums in fp32."""
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
                self._tell(text)  # the other ranks may have room, and would wait for this one
            raise ValueError(text)
        self._sums_expected = True

    def admit(self) -> None:
        """Waits until one more gradient may wait on the device."""
        while not self.room.acquire(timeout=POLL_SECONDS):
            self.mover.check()
            self.updater.check()

    def update(self, task: Task) -> int:
        """Has a flat updated after those that were asked for before; returns a number to wait for."""
        self._asked += task.numel
        self._tasks.append(task)
        return self.updater.submit(self._update_next)

    def _update_next(self) -> None:
        """Updates what is next, unless a job before this one did it along with others."""
        group = self._next_group()
        if not group:
            return
        prepared = [task.prepare() for task in group]
        names = " ".join(task.label for task in group)
        factor = group[0].factor.read()
        with compat.label(f"zeroshard.host_update {names}"), trace.on_host(trace.UPDATE, names):
            batches, rules = [batch for batch, _ in prepared], [rules for _, rules in prepared]
            run_together(batches, rules, factor, self.options.seed)
        for task in group:
            task.finish()

    def _next_group(self) -> list[Task]:
        """Flats to update in one call, which keeps the threads from waiting for each other at every flat's end.

        Towards the end of the queue groups become smaller, so that the device gets the last parameters the sooner.
        """
        if not self._tasks:
            return []
        group = [self._tasks.popleft()]
        most = 0 if self.staging is not None else min(GROUP_ELEMENTS, (self._asked - self._begun) // 4)
        elements = group[0].numel
        while self._tasks and self._tasks[0].factor is group[0].factor:
            elements += self._tasks[0].numel
            if elements > most:
                break
            group.append(self._tasks.popleft())
        self._begun += sum(task.numel for task in group)
        return group

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Whoever waits for what this block was about to ask for is told if it fails."""
        try:
            yield
        except BaseException as error:
            self.mover.fail(error)
            self.updater.fail(error)
            raise

    def settle(self) -> None:
        """Until neither the host nor the device has anything to do, for the few who write where copies read."""
        self.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def wait(self) -> None:
        """Until the host has nothing to do; raises what failed."""
        self.mover.wait()
        self.updater.wait()

    def take_traffic(self) -> dict[str, int]:
        """Bytes that were asked to cross between host and device since this was last asked."""
        taken, self._traffic = self._traffic, {trace.DOWN: 0, trace.UP: 0}
        return taken

    @property
    def copies(self) -> int:
        """How many were asked for in all."""
        return self._copies

    def count(self, way: str, size: int) -> None:
        """Notes a copy as it is asked for, not as it is made, so that it counts for the step that asks."""
        self._traffic[way] += size
        self._copies += 1

    @contextmanager
    def on_stream(self, stream: torch.cuda.Stream | None, *after: torch.cuda.Event | None) -> Iterator[None]:
        """Work on a stream of ours, after events."""
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for event in after:
                if event is not None:
                    assert stream is not None
                    stream.wait_event(event)
            yield

    def down_from(self, source: Tensor, target: Tensor, label: str, *after: torch.cuda.Event | None) -> None:
        """Copies from the device and waits for it. On the mover or the updater."""
        self._start(self.down, trace.DOWN, source, target, label, *after, wait=True)

    def start_up(
        self, source: Tensor, target: Tensor, label: str, *after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Starts a copy to the device; the event tells when it has arrived."""
        return self._start(self.up, trace.UP, source, target, label, *after)

    def start_down(
        self, source: Tensor, target: Tensor, label: str, *after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Starts a copy from the device."""
        return self._start(self.down, trace.DOWN, source, target, label, *after)

    def _start(
        self,
        stream: Any,
        way: str,
        source: Tensor,
        target: Tensor,
        label: str,
        *after: torch.cuda.Event | None,
        wait: bool = False,
    ) -> torch.cuda.Event | None:
        with self.on_stream(stream, *after):
            with trace.on_stream(way, label):
                target.copy_(source, non_blocking=True)
            arrived = self.now()
        if wait and arrived is not None:
            arrived.synchronize()
        return arrived


def default_threads(device: torch.device, *, beside_backward: bool = False) -> int:
    """This rank's cores, less those that drive the device, where there is one and enough of them."""
    cores = share().threads
    if device.type != "cuda" or cores < DRIVER_CORES:
        return cores
    return cores - (3 if beside_backward and cores >= CROWDED_CORES else 1)
