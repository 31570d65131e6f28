"""A process group that sends nothing but takes the time that sending would take, so that overlap can be measured.

One real rank of a world of N: every collective occupies the stream it was issued on, and the one wire that all share,
for latency + bytes on the wire / bandwidth. The others' values are taken to be this rank's own, which costs a pass over
them: what lies in memory by chance is soon no number, and a device multiplies that with less power and so faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.fabric import LONELY_BACKENDS


@dataclass(frozen=True)
class Link:
    """How long messages take."""

    name: str
    latency: float
    """Seconds a collective takes however little it moves."""
    bandwidth: float
    """Bytes a second and rank, each way."""

    def seconds(self, size: float, world: int) -> float:
        """Time of a ring all-gather or reduce-scatter of ``size`` bytes in all."""
        return self.latency + size * (world - 1) / world / self.bandwidth


LINKS = {
    "": Link("", 0.0, math.inf),
    "nvlink": Link("nvlink", 20e-6, 350e9),
    "ethernet": Link("ethernet", 50e-6, 25e9),
}


class DelayedGroup(dist.ProcessGroup):
    """Implements what zeroshard, DDP and FSDP2 call."""

    link: Link
    cycles_a_second: float
    wire: torch.cuda.Stream
    made = 0
    spent = 0.0
    """Seconds of communication since it was last set to zero."""
    asked: ClassVar[Counter[torch.dtype]] = Counter()
    """Elements it was asked to move, but for single numbers, since it was last cleared; an all-reduce counts twice."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        DelayedGroup.made += 1  # torch names and registers its own groups only
        self._name = f"delayed-{DelayedGroup.made}"
        torch._C._distributed_c10d._register_process_group(self._name, self)
        self._nobody = torch._C._distributed_c10d.FakeProcessGroup._create_internal(rank, size)

    @property
    def group_name(self) -> str:
        """What torch finds it by."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """What torch asks a group for."""
        return "delayed"

    def _finished(self) -> Any:
        return self._nobody.barrier()  # a work that is done, whatever is asked of it

    def _delay(self, whole: Sequence[Tensor], passes: int = 1) -> None:
        for tensor in whole:
            if tensor.numel() > 1:
                DelayedGroup.asked[tensor.dtype] += passes * tensor.numel()
        seconds = passes * self.link.seconds(sum(tensor.nbytes for tensor in whole), self.size())
        if not seconds:
            return
        DelayedGroup.spent += seconds
        # One wire for all groups and streams: what overlaps in time would share its bandwidth.
        here = torch.cuda.current_stream()
        DelayedGroup.wire.wait_stream(here)
        with torch.cuda.stream(DelayedGroup.wire):
            torch.cuda._sleep(int(seconds * self.cycles_a_second))
        here.wait_stream(DelayedGroup.wire)

    def _allgather_base(self, output: Tensor, source: Tensor, options: Any = None) -> Any:
        output.view(self.size(), -1).copy_(source.reshape(1, -1).expand(self.size(), -1))
        self._delay([output])
        return self._finished()

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, options: Any = None) -> Any:
        output.view(-1).copy_(source.view(self.size(), -1)[self.rank()])
        self._delay([source])
        return self._finished()

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # torch 2.13's names

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        """Reduce-scatter and all-gather."""
        self._delay(tensors, passes=2)
        return self._finished()

    def allgather(self, outputs: list[list[Tensor]], sources: list[Tensor], options: Any = None) -> Any:
        """Used for Python objects."""
        for targets, source in zip(outputs, sources, strict=True):
            for target in targets:
                target.copy_(source)
        return self._finished()

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        """Takes this rank's values."""
        return self._finished()

    def barrier(self, options: Any = None) -> Any:
        """Nobody else is there."""
        return self._finished()


@contextmanager
def delayed_world(size: int, link: Link) -> Iterator[None]:
    """A world of ``size`` ranks, of which only this one is real, over a given link."""
    DelayedGroup.link = link
    LONELY_BACKENDS.add("delayed")
    if link.latency:  # without one also on a CPU
        DelayedGroup.cycles_a_second, DelayedGroup.wire = _cycles_a_second(), torch.cuda.Stream()
    if "delayed" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "delayed", lambda store, rank, size, timeout: DelayedGroup(rank, size), devices=["cuda", "cpu"]
        )
    dist.init_process_group("delayed", store=dist.HashStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _cycles_a_second() -> float:
    cycles = 50_000_000
    torch.cuda._sleep(cycles)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    torch.cuda._sleep(cycles)
    events[1].record()
    torch.cuda.synchronize()
    return float(cycles / (events[0].elapsed_time(events[1]) / 1e3))
