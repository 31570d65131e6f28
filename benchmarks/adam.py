"""The host optimizer's whole step beside DeepSpeed's, torch's and the speed of the memory itself, in one run.

    python benchmarks/adam.py [--parameters 48] [--threads 2] [--rounds 15] [--out FILE.json]

A step here is what the host does between the arrival of a gradient and the departure of a 16-bit parameter: unscale,
AdamW, cast. Peers do it in the passes that they do it in, with gradients in the precision that they want them in. All
take turns, so that a machine that slows down slows all of them, and what counts is the ratio within a round. All memory
is huge pages where the system has them. Bandwidth is that of the quickest of torch's copy, triad and scaling in place,
counted as STREAM does, on the same number of threads. The last column is a step's bytes per second as a part of it. A
peer that is not installed, or fails to start, is named and left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from zeroshard.offload.codes import TILE
from zeroshard.offload.kernel import Pool, Segment
from zeroshard.offload.library import Simd
from zeroshard.offload.rules import AdamRule
from zeroshard.system.machine import Cpu, read_cpuinfo

FACTOR = 0.5  # unscaling times clipping
RULE = AdamRule(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, maximize=False, step=100)
OURS = "zeroshard"
SETTLING_ROUNDS = 2
PAUSE = 0.02  # seconds before each turn: OpenMP's threads spin for a while after theirs

Step = Callable[[], object]


class Contestant(NamedTuple):
    """One way to do the host's step, or to move bytes."""

    name: str
    build: Callable[[int, Pool], Step]
    bytes: int
    """Moved for each parameter, at least: what is read and what is written."""
    needs: str | None = None
    is_bandwidth: bool = False


@dataclass(frozen=True)
class Result:
    """What one of them took, over all rounds."""

    name: str
    seconds: float
    """Median over rounds."""
    nanoseconds_per_parameter: float
    gigabytes_per_second: float
    ratio: float
    """How many times as long as ours in the same round; median over rounds."""
    ratio_low: float
    ratio_high: float
    of_plain_pass: float
    """Its bytes per second as a part of the best that any plain pass had in the same round; median over rounds."""


def tensor(length: int, dtype: torch.dtype, value: float = 0.01) -> Tensor:
    """Memory in huge pages, which nothing else has used."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory seldom gets huge pages
    memory = mmap.mmap(-1, max(length, 1) * dtype.itemsize, flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=length).fill_(value)


# -- steps ------------------------------------------------------------------------------------------------------------


def ours(moments: torch.dtype | Literal["8bit"], split: bool = False) -> Callable[[int, Pool], Step]:
    """Our kernel; the parameter goes over the gradient's slot, or is the master's upper half."""

    def build(length: int, pool: Pool) -> Step:
        gradient = tensor(length, torch.bfloat16)
        master = tensor(length, torch.int16, 0) if split else tensor(length, torch.float32)
        parameter = tensor(length, torch.bfloat16) if split else gradient
        dtypes = (torch.int8, torch.uint8) if moments == "8bit" else (moments, moments)
        tiles = -(-length // TILE)
        segment = Segment(
            gradient,
            master,
            parameter,
            tuple(tensor(length, dtype, 0) for dtype in dtypes),
            key=0,
            start=0,
            scales=tuple(tensor(tiles, torch.uint8, 0) for _ in dtypes) if moments == "8bit" else (),
        )
        batch = pool.prepare([segment])
        return lambda: pool.update([(batch, [RULE])], FACTOR)

    return build


def torch_fused(length: int, pool: Pool) -> Step:
    """Cast the gradient up, AdamW that unscales as it goes, cast the parameter down."""
    gradient, parameter = tensor(length, torch.bfloat16), tensor(length, torch.bfloat16)
    master = torch.nn.Parameter(tensor(length, torch.float32))
    master.grad = tensor(length, torch.float32)
    optimizer = torch.optim.AdamW([master], lr=RULE.lr, weight_decay=RULE.weight_decay, fused=True)
    states = {"exp_avg": tensor(length, torch.float32), "exp_avg_sq": tensor(length, torch.float32)}
    optimizer.state[master] = {"step": torch.tensor(float(RULE.step)), **states}
    # As torch.amp.GradScaler hands them over.
    optimizer.grad_scale = torch.tensor(1 / FACTOR)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]

    def step() -> None:
        assert master.grad is not None
        master.grad.copy_(gradient)
        optimizer.step()
        parameter.copy_(master.detach())

    return step


def deepspeed(length: int, pool: Pool) -> Step:
    """As its ZeRO-Offload does: gradients arrive in fp32 and are scaled in a pass, then CPUAdam, then a cast."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = tensor(length, torch.bfloat16)
    master = torch.nn.Parameter(tensor(length, torch.float32))
    master.grad = tensor(length, torch.float32)
    optimizer = DeepSpeedCPUAdam([master], lr=RULE.lr, weight_decay=RULE.weight_decay)
    states = {"exp_avg": tensor(length, torch.float32), "exp_avg_sq": tensor(length, torch.float32)}
    optimizer.state[master] = {"step": RULE.step, **states}

    def step() -> None:
        assert master.grad is not None
        master.grad.mul_(FACTOR)
        optimizer.step()
        parameter.copy_(master.detach())

    return step


# -- the memory itself ------------------------------------------------------------------------------------------------


def copy(length: int, pool: Pool) -> Step:
    """Reads one array, writes another."""
    to, source = tensor(length, torch.float32), tensor(length, torch.float32)
    return lambda: to.copy_(source)


def triad(length: int, pool: Pool) -> Step:
    """Reads two arrays, writes a third."""
    to, one, two = (tensor(length, torch.float32) for _ in range(3))
    return lambda: torch.add(one, two, alpha=0.5, out=to)


def scale(length: int, pool: Pool) -> Step:
    """Reads and writes one array: like the optimizer, it fetches nothing only to overwrite it."""
    values = tensor(length, torch.float32)
    return lambda: values.mul_(0.999)


CONTESTANTS = [
    Contestant(OURS, ours(torch.float32), bytes=28),
    Contestant("zeroshard, split master", ours(torch.float32, split=True), bytes=26),
    Contestant("zeroshard, 16-bit moments", ours(torch.bfloat16), bytes=20),
    Contestant("zeroshard, 16-bit moments, split master", ours(torch.bfloat16, split=True), bytes=18),
    Contestant("zeroshard, 8-bit moments", ours("8bit"), bytes=16),
    Contestant("zeroshard, 8-bit moments, split master", ours("8bit", split=True), bytes=14),
    Contestant("torch fused + casts", torch_fused, bytes=28 + 4 + 4 + 4),
    Contestant("deepspeed scale + CPUAdam + cast", deepspeed, bytes=28 + 10 + 4, needs="deepspeed"),
    Contestant("copy", copy, bytes=8, is_bandwidth=True),
    Contestant("triad", triad, bytes=12, is_bandwidth=True),
    Contestant("scale in place", scale, bytes=8, is_bandwidth=True),
]


# -- the race ---------------------------------------------------------------------------------------------------------


def start(length: int, pool: Pool, console: Console) -> dict[Contestant, Step]:
    """Everybody's memory, and who is left out why."""
    started: dict[Contestant, Step] = {}
    for contestant in CONTESTANTS:
        if contestant.needs is not None and importlib.util.find_spec(contestant.needs) is None:
            console.print(
                f"{contestant.name}: left out, {contestant.needs} is not installed (pip install '.\\[bench]')"
            )
            continue
        try:
            step = contestant.build(length, pool)
            step()
        except (RuntimeError, ImportError, ValueError) as error:
            console.print(f"{contestant.name}: left out, it failed: {error}", markup=False)
        else:
            started[contestant] = step
    return started


def race(started: dict[Contestant, Step], rounds: int) -> dict[Contestant, list[float]]:
    """Seconds of each in each round."""
    seconds: dict[Contestant, list[float]] = {contestant: [] for contestant in started}
    for number in range(SETTLING_ROUNDS + rounds):
        for contestant, step in started.items():
            time.sleep(PAUSE)
            begin = time.perf_counter()
            step()
            if number >= SETTLING_ROUNDS:
                seconds[contestant].append(time.perf_counter() - begin)
    return seconds


def summarise(contestant: Contestant, seconds: list[float], race: dict[Contestant, list[float]], length: int) -> Result:
    """Medians over rounds."""
    baseline = next(times for other, times in race.items() if other.name == OURS)
    quickest = [
        max(other.bytes / taken for other, taken in zip(race, taken_by_all, strict=True) if other.is_bandwidth)
        for taken_by_all in zip(*race.values(), strict=True)
    ]
    ratios = [theirs / mine for theirs, mine in zip(seconds, baseline, strict=True)]
    median = statistics.median(seconds)
    return Result(
        name=contestant.name,
        seconds=median,
        nanoseconds_per_parameter=1e9 * median / length,
        gigabytes_per_second=contestant.bytes * length / median / 1e9,
        ratio=statistics.median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        of_plain_pass=statistics.median(
            contestant.bytes / taken / best for taken, best in zip(seconds, quickest, strict=True)
        ),
    )


def table_of(results: list[Result]) -> Table:
    """Results as a table to read."""
    table = Table()
    table.add_column("host step")
    for heading in ("ms", "ns/parameter", "GB/s", f"× {OURS}'s time", "in rounds", "of a plain pass"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result.name,
            f"{1e3 * result.seconds:.1f}",
            f"{result.nanoseconds_per_parameter:.3f}",
            f"{result.gigabytes_per_second:.1f}",
            f"{result.ratio:.2f}",
            f"{result.ratio_low:.2f}–{result.ratio_high:.2f}",
            f"{result.of_plain_pass:.0%}",
        )
    return table


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=48, help="in millions")
    parser.add_argument("--threads", type=int, help="of everybody; by default all cores of this process")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--simd", type=Simd, help="our path: avx512, avx2 or portable")
    parser.add_argument("--out", type=Path, help="write the results here as JSON too")
    return parser.parse_args()


def main() -> None:
    """Builds everybody, lets them take turns, prints a table."""
    args = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 120)
    length = round(args.parameters * 1e6)
    pool = Pool(args.threads, args.simd)
    torch.set_num_threads(pool.threads)
    os.environ["OMP_NUM_THREADS"] = str(pool.threads)  # DeepSpeed's kernel brings an OpenMP of its own
    os.environ["DS_ACCELERATOR"] = "cpu"
    machine = f"{Cpu.parse(read_cpuinfo()).model}, torch {torch.__version__}"
    console.print(
        f"{machine}\nΨ = {length / 1e6:.0f}M, {pool.threads} threads, {pool.simd.value}, bf16 gradients and parameters",
        highlight=False,
    )
    started = start(length, pool, console)
    seconds = race(started, args.rounds)
    results = [summarise(contestant, times, seconds, length) for contestant, times in seconds.items()]
    console.print(table_of(results))
    if args.out is not None:
        report = {
            "machine": machine,
            "parameters": length,
            "threads": pool.threads,
            "simd": pool.simd.value,
            "results": [asdict(result) for result in results],
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
