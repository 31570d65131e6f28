"""A lane: an ordered sequence of collectives among the ranks of one process group.

All ranks of a lane issue the same operations in the same order. The ranks compare a running hash of the operations
once a step (``Reducer.agree``). On CUDA a lane has a stream of its own. How tensors travel is in ``transport``.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..config.bounds import MESSAGE_BYTES
from ..system import compat_groups, trace
from .traffic import Collective, Meter
from .transport import Finish, Transport, all_gather
from .watchdog import Watchdog

LOG_LENGTH = 4096
"""How many operations a lane remembers. The log names the first operation in which ranks differ."""
_NOTHING: AbstractContextManager[None] = nullcontext()


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Makes later work see the result. Blocks the host on CPU, and only the current stream on CUDA."""


class Gather(NamedTuple):
    """The arguments of an all-gather."""

    whole: Tensor
    shard: Tensor
    label: str


class Done:
    """An operation that is over, or that had nothing to do."""

    def wait(self) -> None:
        pass


@dataclass(eq=False, slots=True)
class _OnStream:
    """An operation that the device was given."""

    ready: torch.cuda.Event
    """All work that the operation has to wait for on this rank is done."""
    done: torch.cuda.Event
    watchdog: Watchdog
    entry: str
    """The operation, as the lane's log has it."""

    def wait(self) -> None:
        self.watchdog.check()  # an operation that was aborted is done, too, and its result is not there
        torch.cuda.current_stream().wait_event(self.done)

    def __str__(self) -> str:
        return self.entry


@dataclass
class _OnHost:
    """An operation that the waiting thread itself completes."""

    watchdog: Watchdog
    finish: Finish
    entry: str
    """The operation, as the lane's log has it."""
    traced: Callable[[], None] | None = None
    """Called at the end of the operation, if it is traced."""
    done: bool = False

    def wait(self) -> None:
        if not self.done:
            with self.watchdog.blaming(self.entry, half_done=True):
                self.finish()
            self.done = True
            if self.traced is not None:
                self.traced()


def wait_on_host(pending: Pending) -> None:
    """Blocks the host. For a caller that does not know which stream will use the memory next."""
    if isinstance(pending, _OnStream):
        pending.done.synchronize()
    else:
        pending.wait()


class Lane:
    """An ordered sequence of collectives among the ranks of one group.

    ``group`` is None if this rank is alone on the lane.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup | None,
        transport: Transport,
        device: torch.device,
        watchdog: Watchdog,
        *,
        joint: bool = True,
    ) -> None:
        """``joint``: all ranks issue the same operations on their lanes of this name."""
        self.name, self.group, self._joint = name, group, joint
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self.meter = Meter()
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.hash = 0
        self.log: deque[str] = deque(maxlen=LOG_LENGTH)
        self._transport, self._device, self._watchdog = transport, device, watchdog
        self._under_way: deque[_OnStream] = deque()
        """Operations that the device may not have completed, if ``watched``."""
        self.watched = False
        """Whether somebody asks which operations are done."""

    def all_gather(
        self, whole: Tensor, shard: Tensor, label: str, allocate: Callable[[], None] | None = None
    ) -> Pending:
        """Puts every rank's shard into ``whole``. ``shard`` may be this rank's slice of ``whole``.

        ``allocate`` gives ``whole`` its memory. It runs on the lane's stream, after all work that the device was given
        so far. So it may reuse memory that this work has released.
        """

        def start() -> Finish | None:
            if allocate is not None:
                allocate()
            return None if self.group is None else self._transport.all_gather(whole, shard, label)

        if self.group is None:
            return self._start(start, label)
        return self._start(start, self._note(Collective.ALL_GATHER, whole, label), trace.GATHER)

    def all_gather_together(self, gathers: Sequence[Gather]) -> list[Pending]:
        """``all_gather`` of many. On a device, small ones are one operation: each operation costs the host 0.1 ms."""
        if self.stream is None:
            return [self.all_gather(*gather) for gather in gathers]
        pendings: list[Pending] = []
        for message in _messages(gathers):
            entries = [self._note(Collective.ALL_GATHER, gather.whole, gather.label) for gather in message]
            operation = entries[0] if len(entries) == 1 else f"{entries[0]} to {message[-1].label}"
            pendings += [self._start(partial(self._gather, message), operation, trace.GATHER)] * len(message)
        return pendings

    def _gather(self, message: list[Gather]) -> None:
        with self._transport.together():
            for whole, shard, label in message:
                self._transport.all_gather(whole, shard, label)

    def reduce_scatter(self, whole: Tensor, shard: Tensor, label: str) -> Pending:
        """Averages ``whole`` over the ranks. This rank's slice goes to ``shard``, which may be that slice."""
        operation = self._note(Collective.REDUCE_SCATTER, whole, label)
        return self._start(lambda: self._transport.reduce_scatter(whole, shard, label), operation, trace.REDUCE)

    def all_reduce(self, whole: Tensor, label: str) -> Pending:
        """Averages ``whole`` over the ranks, in place."""
        operation = self._note(Collective.ALL_REDUCE, whole, label)
        return self._start(lambda: self._transport.all_reduce(whole, label), operation, trace.REDUCE)

    def gather_small(self, value: Tensor) -> Tensor:
        """The values of all ranks, one row each. Neither counted nor hashed."""
        rows = torch.empty(self.world, *value.shape, dtype=value.dtype, device=value.device)
        self.run(lambda: all_gather(rows, value[None], group=self.group), "a small gather").wait()
        return rows

    def broadcast(self, tensor: Tensor) -> None:
        """Takes the first rank's values. Neither counted nor hashed."""
        if self.group is not None:
            self.run(lambda: dist.broadcast(tensor, group=self.group, group_src=0), "a broadcast").wait()

    def run(self, work: Callable[[], object], operation: str = "a copy") -> Pending:
        """Does other work on the lane's stream, such as a copy to the host, after the device's work so far."""

        def start() -> None:
            work()

        return self._start(start, operation)

    def waiting(self) -> _OnStream | None:
        """The operation on the device that waits for other ranks now. The watchdog's thread asks.

        Operations end in their order. The first one that is not done waits for other ranks if all work of this rank
        before it is done.
        """
        first = None if self.idle() else self._under_way[0]
        return first if first is not None and first.ready.query() else None

    def idle(self) -> bool:
        """Whether the device has completed all operations."""
        while self._under_way and self._under_way[0].done.query():
            self._under_way.popleft()
        return not self._under_way

    def abort(self) -> None:
        """Ends all operations on the device. None is possible afterwards."""
        if self.stream is not None and self.group is not None:
            compat_groups.abort(self.group)

    def _note(self, kind: Collective, whole: Tensor, label: str) -> str:
        """Notes an operation that begins, and returns it in words."""
        entry = f"{kind.value} {label}"
        self.hash = zlib.crc32(entry.encode(), self.hash)
        self.log.append(entry)
        self._watchdog.note(f"{entry} ({self.name})", joint=self._joint)
        if self.group is not None:
            self.meter.count(kind, whole.numel(), whole.element_size())
        return entry

    def _start(self, start: Callable[[], Finish | None], operation: str, track: str | None = None) -> Pending:
        """``track``: where a trace shows the operation. None shows it nowhere."""
        self._watchdog.check()
        try:
            if self.stream is None:
                traced = trace.collective(track, operation)
                finish = start()
                if finish is not None:
                    return _OnHost(self._watchdog, finish, operation, traced)
                if traced is not None:
                    traced()
                return Done()
            # The lane waits for all work that the device was given so far. Inputs are then written, and nobody reads
            # released memory any more. Work that the device is given later runs at the same time as the lane.
            before, ready = torch.cuda.current_stream(self._device), torch.cuda.Event()
            ready.record(before)
            self.stream.wait_event(ready)
            with _Current(self.stream, before), trace.on_stream(track, operation) if track else _NOTHING:
                start()
        except RuntimeError as error:
            self._watchdog.raise_stall(operation, error)
            raise
        done = torch.cuda.Event()
        done.record(self.stream)
        pending = _OnStream(ready, done, self._watchdog, operation)
        if self.watched:
            self._under_way.append(pending)
        return pending


class _Current:
    """Inside, the device's work goes to a stream. Does what ``torch.cuda.stream`` does, with fewer calls."""

    def __init__(self, stream: torch.cuda.Stream, before: torch.cuda.Stream) -> None:
        """``before`` is the current stream of the same device."""
        self._stream, self._before, self._device = stream, before, torch.cuda.current_device()

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._before)
        if self._device != self._stream.device_index:  # a stream brings its device
            torch.cuda.set_device(self._device)


def _messages(gathers: Sequence[Gather]) -> Iterator[list[Gather]]:
    """Divides gathers into messages of at most ``MESSAGE_BYTES``. A larger gather is a message by itself."""
    message: list[Gather] = []
    size = 0
    for gather in gathers:
        if message and size + gather.whole.nbytes > MESSAGE_BYTES:
            yield message
            message, size = [], 0
        message.append(gather)
        size += gather.whole.nbytes
    if message:
        yield message
