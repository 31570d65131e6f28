"""A lane: an ordered sequence of collectives among the ranks of one process group.

All ranks of a lane issue the same operations in the same order. The ranks compare a running hash of the operations
once a step (``Reducer.agree``). On CUDA a lane has a stream of its own. How tensors travel is in ``transport``.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .traffic import Collective, Meter
from .transport import Finish, Transport, all_gather
from .watchdog import Watchdog

LOG_LENGTH = 4096
"""How many operations a lane remembers. The log names the first operation in which ranks differ."""


class StallError(RuntimeError):
    """A collective did not complete. The message names the missing rank, and where it was last seen."""


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Makes later work see the result. Blocks the host on CPU, and only the current stream on CUDA."""


class Done:
    """An operation that is over, or that had nothing to do."""

    def wait(self) -> None:
        pass


@dataclass
class _OnStream:
    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


@dataclass
class _OnHost:
    """An operation that the waiting thread itself completes."""

    lane: Lane
    finish: Finish
    entry: str
    """The operation, as the lane's log has it."""
    done: bool = False

    def wait(self) -> None:
        if not self.done:
            with self.lane.blaming_stalls(self.entry):
                try:
                    self.finish()
                except BaseException as error:
                    self.lane.break_off(f"{type(error).__name__}: {error}")  # a sum may be incomplete
                    raise
            self.done = True


def wait_on_host(pending: Pending) -> None:
    """Blocks the host. For a caller that does not know which stream will use the memory next."""
    if isinstance(pending, _OnStream):
        pending.event.synchronize()
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
    ) -> None:
        self.name, self.group = name, group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self.meter = Meter()
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.hash = 0
        self.log: deque[str] = deque(maxlen=LOG_LENGTH)
        self._transport, self._device, self._watchdog = transport, device, watchdog
        self._broken: str | None = None
        """Why an operation did not complete. Ranks no longer know which data has arrived where."""

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

        if self.group is not None:
            self._note(Collective.ALL_GATHER, whole, label)
        return self._start(start)

    def reduce_scatter(self, whole: Tensor, shard: Tensor, label: str) -> Pending:
        """Averages ``whole`` over the ranks. This rank's slice goes to ``shard``, which may be that slice."""
        self._note(Collective.REDUCE_SCATTER, whole, label)
        return self._start(lambda: self._transport.reduce_scatter(whole, shard, label))

    def all_reduce(self, whole: Tensor, label: str) -> Pending:
        """Averages ``whole`` over the ranks, in place."""
        self._note(Collective.ALL_REDUCE, whole, label)
        return self._start(lambda: self._transport.all_reduce(whole, label))

    def gather_small(self, value: Tensor) -> Tensor:
        """The values of all ranks, one row each. Neither counted nor hashed."""
        rows = torch.empty(self.world, *value.shape, dtype=value.dtype, device=value.device)
        with self.blaming_stalls("a small gather"):
            all_gather(rows, value[None], group=self.group)
        return rows

    def run(self, work: Callable[[], object]) -> Pending:
        """Does other work on the lane's stream, such as a copy to the host, after the device's work so far."""

        def start() -> None:
            work()

        return self._start(start)

    @contextmanager
    def blaming_stalls(self, operation: str) -> Iterator[None]:
        """Turns a time-out or lost connection of the backend into an error that names the rank and the operation.

        The lane is broken from then on. Later operations raise, so no rank uses data that did not arrive.
        """
        if self._broken is not None:
            raise StallError(f"{self._broken} (no collective is possible since an earlier one failed)")
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, StallError) or not _is_of_the_backend(error):
                raise
            stall = StallError(f"{self._watchdog.explain(operation)} (the backend said: {error})")
            self.break_off(str(stall))
            raise stall from error

    def break_off(self, why: str) -> None:
        """Refuses all later operations on this lane."""
        self._broken = why

    def _note(self, kind: Collective, whole: Tensor, label: str) -> None:
        entry = f"{kind.value} {label}"
        self.hash = zlib.crc32(entry.encode(), self.hash)
        self.log.append(entry)
        self._watchdog.note(f"{entry} ({self.name})")
        if self.group is not None:
            self.meter.count(kind, whole.numel(), whole.element_size())

    def _start(self, start: Callable[[], Finish | None]) -> Pending:
        operation = self.log[-1] if self.log else "the first collective"
        if self.stream is None:
            with self.blaming_stalls(operation):
                finish = start()
            return Done() if finish is None else _OnHost(self, finish, operation)
        # The lane waits for all work that the device was given so far. Inputs are then written, and nobody reads
        # released memory any more. Work that the device is given later runs at the same time as the lane.
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream), self.blaming_stalls(operation):
            start()
        event = torch.cuda.Event()
        event.record(self.stream)
        return _OnStream(event)


def _is_of_the_backend(error: RuntimeError) -> bool:
    """Whether the backend raised an error. Gloo raises plain RuntimeErrors, which are known by their text."""
    return isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in ("gloo", "timed out"))
