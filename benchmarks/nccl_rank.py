"""A rank of `nccl_step.py`: builds, trains and discards one variant after the other, as the parent asks."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import statistics
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.nccl_variants import VARIANTS, Job, Trainer
from tests.nccl.processes import environment

LAUNCHES = 3
"""Steps whose launching is timed by itself."""


class Turn(NamedTuple):
    """What the parent asks of a rank."""

    variant: int
    warmup: int
    steps: int


class Ready(NamedTuple):
    """A rank's first answer."""

    device: str


@dataclass(frozen=True)
class Measured:
    """What one rank measured in a turn; or the largest figures of all ranks, and their mean loss."""

    seconds: float
    """Median over steps."""
    mean_seconds: float
    """Mean over steps. The end of the last update is included."""
    host_seconds: float
    """In `optimizer.step()`, median over steps."""
    host_seconds_max: float
    launch_seconds: float
    """In `optimizer.step()`, where the device has nothing else to do: what the host itself needs. Median."""
    peak_gib: float
    """Allocated by torch during the timed steps, above what was allocated before the variant was built."""
    loss: float


def serve(rank: int, world: int, port: int, job: Job, connection: Connection) -> None:
    """Takes every turn that the parent asks for. Answers with `Measured`, or with the error's text."""
    warnings.filterwarnings("ignore", "`torch.distributed.*deprecated", FutureWarning)  # names that peers call
    os.environ.update(environment(rank, world, port))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # NCCL has sockets for every group of every variant
    on_gpu = job.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(job.device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=job.device if on_gpu else None)
    generator = torch.Generator().manual_seed(rank)
    shape = (job.batch, job.config.sequence + 1)
    text = torch.randint(0, job.config.vocabulary, shape, generator=generator).to(job.device)
    dist.barrier()
    connection.send(Ready(torch.cuda.get_device_name() if on_gpu else "CPU"))
    while (turn := connection.recv()) is not None:
        try:
            answer: Measured | str = measure(turn, job, text[:, :-1].contiguous(), text[:, 1:].contiguous())
        except Exception as error:
            traceback.print_exc()
            answer = f"{type(error).__name__}: {error}".splitlines()[0][:200]  # it goes into a table
        connection.send(answer)
    dist.barrier()
    dist.destroy_process_group()


def measure(turn: Turn, job: Job, tokens: Tensor, targets: Tensor) -> Measured:
    """Builds a variant, trains it, and discards it."""
    on_gpu = job.device.type == "cuda"
    gc.collect()  # the variant before
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    trainer = VARIANTS[turn.variant].build(job)
    host: list[float] = []

    def step() -> Tensor:
        loss = trainer.backward(tokens, targets)
        begin = time.perf_counter()
        trainer.update()
        host.append(time.perf_counter() - begin)
        trainer.clear()
        return loss

    for _ in range(turn.warmup):
        step()
    host.clear()
    dist.barrier()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    clock = GpuClock() if on_gpu else HostClock()
    begin = time.perf_counter()
    clock.mark()
    for _ in range(turn.steps):
        loss = step()
        clock.mark()
    trainer.finish()
    spans = clock.spans()
    mean = (time.perf_counter() - begin) / turn.steps
    peak = (torch.cuda.max_memory_allocated() - base) / 2**30
    launch = [launch_alone(trainer, tokens, targets, on_gpu) for _ in range(LAUNCHES)]
    trainer.close()
    return Measured(
        statistics.median(spans), mean, statistics.median(host), max(host), statistics.median(launch), peak, loss.item()
    )


def launch_alone(trainer: Trainer, tokens: Tensor, targets: Tensor, on_gpu: bool) -> float:
    """Seconds inside `optimizer.step()` of a device that is done with backward. All ranks begin together."""
    trainer.backward(tokens, targets)
    dist.barrier()
    if on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    trainer.update()
    seconds = time.perf_counter() - begin
    trainer.clear()
    trainer.finish()
    return seconds


class HostClock:
    """Seconds between marks, as the host reaches them."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def spans(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self._marks)]


class GpuClock:
    """Seconds between marks, as the device reaches them."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        self._marks.append(torch.cuda.Event(enable_timing=True))
        self._marks[-1].record()

    def spans(self) -> list[float]:
        """Waits for the device."""
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(self._marks)]
