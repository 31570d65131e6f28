"""A process group that sends nothing but takes the time that sending would take, so that overlap can be measured.

One real rank of a world of N: every collective occupies the stream it was issued on, and the one wire that all share,
for latency + bytes on the wire / bandwidth. The others' values are taken to be this rank's own, which costs a pass over
them: what lies in memory by chance is soon no number, and a device multiplies that with less power and so faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


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

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        DelayedGroup.made += 1  # torch names and registers its own groups only
        self._name = f"delayed-{DelayedGroup.made}"
        torch._C._distributed_c10d._register_process_group(self._name, self)

    @property
    def group_name(self) -> str:
        """What torch finds it by."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """What torch asks a group for."""
        return "delayed"

    def _delay(self, size: float, passes: int = 1) -> None:
        seconds = passes * self.link.seconds(size, self.size())
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
        self._delay(output.nbytes)
        return _finished(output)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, options: Any = None) -> Any:
        output.view(-1).copy_(source.view(self.size(), -1)[self.rank()])
        self._delay(source.nbytes)
        return _finished(output)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # torch 2.13's names

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        """Reduce-scatter and all-gather."""
        self._delay(sum(tensor.nbytes for tensor in tensors), passes=2)
        return _finished(tensors)

    def allgather(self, outputs: list[list[Tensor]], sources: list[Tensor], options: Any = None) -> Any:
        """Used for Python objects."""
        for targets, source in zip(outputs, sources, strict=True):
            for target in targets:
                target.copy_(source)
        return _finished(outputs)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        """Takes this rank's values."""
        return _finished(tensors)

    def barrier(self, options: Any = None) -> Any:
        """Nobody else is there."""
        return _finished([])


def _finished(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return torch._C._distributed_c10d._create_work_from_future(future)


@contextmanager
def delayed_world(size: int, link: Link) -> Iterator[None]:
    """A world of ``size`` ranks, of which only this one is real, over a given link."""
    DelayedGroup.link, DelayedGroup.cycles_a_second = link, _cycles_a_second()
    DelayedGroup.wire = torch.cuda.Stream()
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
