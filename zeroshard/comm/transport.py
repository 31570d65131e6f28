"""Three ways to carry the collectives of a lane.

- ``Collectives``: the backend's own operations.
- ``PointToPoint``: single messages, for Gloo on the CPU. Gloo's own all-gather and reduce-scatter allocate a whole
  extra buffer and take 2-3 times as long.
- ``Copies``: this rank's values stand in for the values of all others. For torch's "fake" backend, where one rank of a
  large world runs alone. The fake backend's own all-gather would launch one kernel for every rank.

Every method starts an operation. It returns None if nothing is left to do on the host, else a function that completes
the operation.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..system import compat, compat_groups
from ..system.waits import Cause, Waits

# torch 2.13 renamed these two, and warns on the old names. torch 2.11 has only the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Finish = Callable[[], None]
"""Completes an operation that was started."""


class Transport(Protocol):
    """Carries collectives among the ranks of one group."""

    def all_gather(self, whole: Tensor, shard: Tensor, label: str) -> Finish | None:
        """Puts every rank's shard into ``whole``. ``shard`` may be this rank's slice of ``whole``."""

    def reduce_scatter(self, whole: Tensor, shard: Tensor, label: str) -> Finish | None:
        """Averages ``whole`` over the ranks. This rank's slice goes to ``shard``, which may be that slice."""

    def all_reduce(self, whole: Tensor, label: str) -> Finish | None:
        """Averages ``whole`` over the ranks, in place."""

    def together(self) -> AbstractContextManager[object]:
        """All-gathers that begin inside are one operation, if the backend can do that."""


def transport_for(
    group: dist.ProcessGroup | None, backend: str, device: torch.device, patience: timedelta, waits: Waits
) -> Transport:
    """The transport for a group. ``group`` is None for a world of one."""
    if group is None:
        return Copies(0, 1)
    if backend == "fake":
        return Copies(dist.get_rank(group), dist.get_world_size(group))
    if backend == "gloo" and device.type == "cpu":
        return PointToPoint(group, patience, waits)
    return Collectives(group, backend)


class Collectives:
    """The backend's own operations."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        self._group, self._world = group, dist.get_world_size(group)
        self._is_nccl = backend == "nccl"

    def all_gather(self, whole: Tensor, shard: Tensor, label: str) -> None:
        all_gather(whole, shard, group=self._group)

    def reduce_scatter(self, whole: Tensor, shard: Tensor, label: str) -> None:
        self._average(whole, shard, lambda op: reduce_scatter(shard, whole, op, group=self._group))

    def all_reduce(self, whole: Tensor, label: str) -> None:
        self._average(whole, whole, lambda op: dist.all_reduce(whole, op, group=self._group))

    def together(self) -> AbstractContextManager[object]:
        return compat_groups.together(self._group) if self._is_nccl else nullcontext()

    def _average(self, inputs: Tensor, outputs: Tensor, reduce: Callable[[dist.ReduceOp.RedOpType], object]) -> None:
        if self._is_nccl:  # Gloo can only add
            reduce(dist.ReduceOp.AVG)
        else:
            _divide_before_sum(inputs, self._world)
            reduce(dist.ReduceOp.SUM)
            _divide_after_sum(outputs, self._world)


class PointToPoint:
    """Single messages between pairs of ranks."""

    def __init__(self, group: dist.ProcessGroup, patience: timedelta, waits: Waits) -> None:
        self._group, self._patience, self._waits = group, patience, waits
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._peers = [(self._rank - step) % self._world for step in range(1, self._world)]
        """The other ranks. Each rank begins with a different one."""

    def all_gather(self, whole: Tensor, shard: Tensor, label: str) -> Finish:
        tag = _tag("g", label)
        slices = whole.tensor_split(self._world)
        own = slices[self._rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        works = [self._receive(slices[peer], peer, tag) for peer in self._peers]
        works += [self._send(own, peer, tag) for peer in self._peers]
        return lambda: self._complete(works)

    def reduce_scatter(self, whole: Tensor, shard: Tensor, label: str) -> Finish:
        tag = _tag("r", label)
        _divide_before_sum(whole, self._world)
        slices = whole.tensor_split(self._world)
        first_peer, *other_peers = self._peers
        # One slice at a time is on its way to this rank, so the extra memory is a shard, not a flat.
        arrived = torch.empty_like(slices[self._rank])
        sends = [self._send(slices[peer], peer, tag) for peer in self._peers]
        first = self._receive(arrived, first_peer, tag)

        def finish() -> None:
            self._complete([first])
            torch.add(slices[self._rank], arrived, out=shard)
            for peer in other_peers:
                self._complete([self._receive(arrived, peer, tag)])
                shard.add_(arrived)
            _divide_after_sum(shard, self._world)
            self._complete(sends)

        return finish

    def all_reduce(self, whole: Tensor, label: str) -> Finish:
        # The exchanges of reduce-scatter and all-gather, so that every stage adds in the same order.
        own = whole.tensor_split(self._world)[self._rank]
        reduce = self.reduce_scatter(whole, own, label)

        def finish() -> None:
            reduce()
            self.all_gather(whole, own, label)()

        return finish

    def together(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        with compat.unrecorded():
            return work_of(dist.isend(tensor, group=self._group, group_dst=peer, tag=tag))

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        with compat.unrecorded():
            return work_of(dist.irecv(tensor, group=self._group, group_src=peer, tag=tag))

    def _complete(self, works: list[dist.Work]) -> None:
        began = self._waits.begin()
        for work in works:
            work.wait(self._patience)
        self._waits.end(Cause.COLLECTIVES, began)


class Copies:
    """This rank's values in place of the values of all ranks."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    def all_gather(self, whole: Tensor, shard: Tensor, label: str) -> None:
        if compat.is_fake(whole):  # no values to copy
            return
        slices = whole.view(self._world, -1)
        if compat.storage_key(whole) != compat.storage_key(shard):
            slices.copy_(shard)
            return
        for others in (slices[: self._rank], slices[self._rank + 1 :]):  # the shard is one of the slices
            others.copy_(shard)

    def reduce_scatter(self, whole: Tensor, shard: Tensor, label: str) -> None:
        shard.view(-1).copy_(whole.view(self._world, -1)[self._rank])

    def all_reduce(self, whole: Tensor, label: str) -> None:
        pass

    def together(self) -> AbstractContextManager[object]:
        return nullcontext()


def _divide_before_sum(tensor: Tensor, world: int) -> None:
    """Division comes first in fp16, so that the sum does not overflow."""
    if tensor.dtype is torch.float16:
        tensor.div_(world)


def _divide_after_sum(tensor: Tensor, world: int) -> None:
    """Division comes last in other dtypes: a reduce-scatter then divides only the slice of this rank."""
    if tensor.dtype is not torch.float16:
        tensor.div_(world)


def work_of(work: dist.Work | None) -> dist.Work:
    """The handle that torch returns for an operation under way."""
    assert work is not None, "this rank is not in the group"
    return work


def _tag(kind: str, label: str) -> int:
    """A number for the messages of one unit. Ranks that are out of order then stall and are named.

    Without this number they would swap the data of two units.
    """
    return zlib.crc32(f"{kind}:{label}".encode()) & 0x7FFFFFFF
