"""An ordered sequence of collectives, and the four transports that carry it.

A *lane* is one process group and, on CUDA, one stream. Within it all ranks issue the same operations in the same
order; a running hash of them is compared once a step (``Reducer.agree``).

Four transports carry a lane: nothing (a world of one); copies of this rank's values in place of the others' (torch's
"fake" backend, for one rank of a world that is not there, whose own gather is a launch for every rank); point-to-point
messages (Gloo on CPU, whose own all-gather and reduce-scatter allocate a whole extra buffer and take 2-3 times as
long); or the backend's collectives.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..system import compat
from .traffic import Collective, Meter

LOG_LENGTH = 4096
"""How many operations a lane remembers, to name the first one on which ranks differ."""


class StallError(RuntimeError):
    """A collective did not complete. The message names the rank that is missing, and where it was last seen."""


class Ranks(Protocol):
    """What a lane must know of the ranks it runs among."""

    device: torch.device
    backend: str
    patience: timedelta

    def progress(self, where: str) -> None:
        """Notes how far this rank is, for the others to read if it stalls."""

    def explain_stall(self, where: str) -> str:
        """Who is missing, and where it was last seen."""


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Makes what follows see the result: blocks the host on CPU, only the current stream on CUDA."""


class Done:
    """Nothing was to be done, or it is done."""

    def wait(self) -> None:
        pass


@dataclass
class _OnStream:
    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def wait_on_host(pending: Pending) -> None:
    """Blocks the host, for a caller that does not know which stream will use the memory next."""
    if isinstance(pending, _OnStream):
        pending.event.synchronize()
    else:
        pending.wait()


@dataclass
class _Messages:
    """Point-to-point messages, and what is to be done when they have arrived."""

    lane: Lane
    finish: Callable[[], None]
    done: bool = False

    def wait(self) -> None:
        if not self.done:
            with self.lane.blaming_stalls():
                try:
                    self.finish()
                except BaseException as error:
                    self.lane.break_off(f"{type(error).__name__}: {error}")  # sums may be half made
                    raise
            self.done = True


class Lane:
    """An ordered sequence of collectives among the ranks of one group."""

    def __init__(self, name: str, ranks: Ranks, group: dist.ProcessGroup | None, meter: Meter) -> None:
        self.name = name
        self._ranks = ranks
        self.group = group
        self.meter = meter
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self.stream = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None
        self._broken: str | None = None
        """Why a collective of this lane did not complete: ranks no longer know of each other what has arrived."""
        self.hash = 0
        self.log: deque[str] = deque(maxlen=LOG_LENGTH)
        self._by_message = ranks.backend == "gloo" and ranks.device.type == "cpu"
        self._alone = ranks.backend == "fake"

    def all_gather(
        self, whole: Tensor, shard: Tensor, label: str, allocate: Callable[[], None] | None = None
    ) -> Pending:
        """Puts every rank's shard into ``whole``; ``shard`` may be this rank's slice of it.

        ``allocate`` gives ``whole`` its memory. It runs on the lane's stream, after the device's work so far, so that
        memory which that work released can be reused safely.
        """
        if self.group is None:  # nobody to gather from
            return self._on_stream(allocate or (lambda: None))
        self._note(Collective.ALL_GATHER, whole, label)
        if self._by_message:
            if allocate is not None:
                allocate()
            return self._exchange_shards(whole, shard, _tag("g", label))

        def run() -> None:
            if allocate is not None:
                allocate()
            if self._alone:
                self._repeat(whole, shard)
            else:
                all_gather(whole, shard, self.group)

        return self._on_stream(run)

    def reduce_scatter(self, whole: Tensor, shard: Tensor, label: str) -> Pending:
        """Averages ``whole`` over the ranks; this rank's slice goes to ``shard``, which may be that very slice."""
        self._note(Collective.REDUCE_SCATTER, whole, label)
        if self._by_message:
            return self._exchange_and_average(whole, shard, _tag("r", label))

        def run() -> None:
            if self._alone:
                shard.view(-1).copy_(whole.view(self.world, -1)[self.rank])
            else:
                self._average_around(whole, shard, lambda op: _reduce_scatter(shard, whole, op, self.group))

        return self._on_stream(run)

    def all_reduce(self, whole: Tensor, label: str) -> Pending:
        """Averages ``whole`` over the ranks, in place."""
        self._note(Collective.ALL_REDUCE, whole, label)
        if self._by_message:
            # The same two exchanges as reduce-scatter and all-gather, so that every stage adds in the same order.
            mine = whole.tensor_split(self.world)[self.rank]
            reduced = self._exchange_and_average(whole, mine, _tag("r", label))

            def finish() -> None:
                reduced.wait()
                self._exchange_shards(whole, mine, _tag("g", label)).wait()

            return _Messages(self, finish)

        def run() -> None:
            if not self._alone:
                self._average_around(whole, whole, lambda op: dist.all_reduce(whole, op, group=self.group))

        return self._on_stream(run)

    def run(self, work: Callable[[], object]) -> Pending:
        """Does something else on the lane's stream, after the device's work so far: a copy to or from the host."""
        return self._on_stream(work)

    @contextmanager
    def blaming_stalls(self) -> Iterator[None]:
        """Turns a backend's time-out or lost connection into an error that names the rank and the unit.

        The lane is broken from then on: what is tried again raises too, and never takes data that did not come.
        """
        if self._broken is not None:
            raise StallError(f"no collective is possible since an earlier one failed: {self._broken}")
        try:
            yield
        except StallError:  # of a collective that this one consists of
            raise
        except RuntimeError as error:
            if not _is_of_the_backend(error):
                raise
            last = self.log[-1] if self.log else "the first collective"
            stall = StallError(f"{self._ranks.explain_stall(last)} (the backend said: {error})")
            self.break_off(str(stall))
            raise stall from error

    def break_off(self, why: str) -> None:
        """Lets no further collective begin or be waited for."""
        self._broken = why

    def _note(self, kind: Collective, whole: Tensor, label: str) -> None:
        entry = f"{kind.value} {label}"
        self.hash = zlib.crc32(entry.encode(), self.hash)
        self.log.append(entry)
        self._ranks.progress(f"{entry} ({self.name})")
        if self.group is not None:
            self.meter.add(kind, whole)

    def _on_stream(self, run: Callable[[], object]) -> Pending:
        if self.stream is None:
            with self.blaming_stalls():
                run()
            return Done()
        # The lane starts after what the device was given so far: inputs are then written, and memory that a release
        # gave back is no longer read. What comes after on the device runs beside it.
        self.stream.wait_stream(torch.cuda.current_stream(self._ranks.device))
        with torch.cuda.stream(self.stream), self.blaming_stalls():
            run()
        event = torch.cuda.Event()
        event.record(self.stream)
        return _OnStream(event)

    def _repeat(self, whole: Tensor, shard: Tensor) -> None:
        if compat.is_fake(whole):  # has no values
            return
        slices = whole.view(self.world, -1)
        for others in (slices[: self.rank], slices[self.rank + 1 :]):  # of which there may be thousands
            others.copy_(shard.view(1, -1).expand_as(others))
        slices[self.rank].copy_(shard.view(-1))

    def _average_around(
        self, inputs: Tensor, outputs: Tensor, reduce: Callable[[dist.ReduceOp.RedOpType], Any]
    ) -> None:
        if self._ranks.backend == "nccl":
            reduce(dist.ReduceOp.AVG)
            return
        # Dividing first keeps fp16 sums from overflowing; for the others once, afterwards, is a smaller pass.
        first = inputs.dtype is torch.float16
        if first:
            inputs.div_(self.world)
        reduce(dist.ReduceOp.SUM)
        if not first:
            outputs.div_(self.world)

    def _exchange_shards(self, whole: Tensor, shard: Tensor, tag: int) -> Pending:
        slices = whole.tensor_split(self.world)
        own = slices[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        with self.blaming_stalls():
            works = [self._receive(slices[peer], peer, tag) for peer in self._peers()]
            works += [self._send(own, peer, tag) for peer in self._peers()]
        return _Messages(self, lambda: self._complete(works))

    def _exchange_and_average(self, whole: Tensor, shard: Tensor, tag: int) -> Pending:
        world, rank = self.world, self.rank
        if whole.dtype is torch.float16:
            whole.div_(world)
        slices = whole.tensor_split(world)
        peers = self._peers()
        # One slice is in flight to this rank at a time: the extra memory is a shard, not a flat.
        arrived = torch.empty_like(slices[rank])
        with self.blaming_stalls():
            sends = [self._send(slices[peer], peer, tag) for peer in peers]
            first = self._receive(arrived, peers[0], tag)

        def finish() -> None:
            self._complete([first])
            torch.add(slices[rank], arrived, out=shard)
            for peer in peers[1:]:
                self._complete([self._receive(arrived, peer, tag)])
                shard.add_(arrived)
            if whole.dtype is not torch.float16:
                shard.div_(world)
            self._complete(sends)

        return _Messages(self, finish)

    def _peers(self) -> list[int]:
        """The other ranks, each rank starting with another one."""
        return [(self.rank - step) % self.world for step in range(1, self.world)]

    def _send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        return work_of(dist.isend(tensor, group=self.group, group_dst=peer, tag=tag))

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        return work_of(dist.irecv(tensor, group=self.group, group_src=peer, tag=tag))

    def _complete(self, works: list[dist.Work]) -> None:
        for work in works:
            work.wait(self._ranks.patience)


def _is_of_the_backend(error: RuntimeError) -> bool:
    """Whether a collective failed, rather than something around it; Gloo raises plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in ("gloo", "timed out"))


def work_of(work: dist.Work | None) -> dist.Work:
    """What torch gives to wait for, where this rank takes part."""
    assert work is not None, "this rank is not in the group"
    return work


def _tag(kind: str, label: str) -> int:
    """Messages of different units never match, so ranks out of order stall and are named rather than swap data."""
    return zlib.crc32(f"{kind}:{label}".encode()) & 0x7FFFFFFF


def all_gather(whole: Tensor, shard: Tensor, group: dist.ProcessGroup | None) -> None:
    """The backend's own, neither counted nor noted."""
    # torch 2.13 renamed both and warns on the old names; 2.11 has only those.
    if hasattr(dist, "all_gather_single"):
        dist.all_gather_single(whole, shard, group=group)
    else:
        dist.all_gather_into_tensor(whole, shard, group=group)


def _reduce_scatter(shard: Tensor, whole: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if hasattr(dist, "reduce_scatter_single"):
        dist.reduce_scatter_single(shard, whole, op, group=group)
    else:
        dist.reduce_scatter_tensor(shard, whole, op, group=group)
