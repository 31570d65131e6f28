"""Seconds in which ranks agree on integers on the host, once a step, by number of ranks; and what 1,024 would take.

    PYTHONPATH=. python benchmarks/agreement.py [--ranks 2 4 8 16 32] [--hop-latency 10e-6] [--out FILE]

Every rank is a process of this machine, with a `Fabric` on the CPU over Gloo. All call `Fabric.maximum` at the same
time; the slowest rank's median counts.

The model is: seconds = fixed + rounds × (seconds a round + latency of a hop), with ceil(log2 ranks) rounds, those of
recursive doubling. The first two are fitted by least squares to the worlds in which every process has a core of its
own, and to a rank alone, which has no round and only turns the integers into a tensor and back. Where processes
outnumber cores they wait for each other's time slices: such worlds are shown and not fitted. The latency between hosts
is not measured here: it is added. An all-reduce of another kind may have more rounds than the model says.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.comm.fabric import Fabric

PATIENCE = 300.0  # seconds in which a world must have been measured
WARMUP = 20
FAR = 1024


@dataclass(frozen=True)
class Point:
    """What one world took."""

    ranks: int
    rounds: int
    seconds: float
    """The slowest rank's median."""
    slowest: float
    """The slowest call of any rank."""


@dataclass(frozen=True)
class Fit:
    """The model, fitted."""

    fixed: float
    a_round: float
    ranks: tuple[int, ...]
    """The worlds it was fitted to."""

    def seconds(self, ranks: int, hop: float) -> float:
        """The model's time for any number of ranks."""
        return self.fixed + rounds_of(ranks) * (self.a_round + hop)


def rounds_of(ranks: int) -> int:
    """Rounds of recursive doubling.

    >>> [rounds_of(ranks) for ranks in (1, 2, 4, 5, 1024)]
    [0, 1, 2, 3, 10]
    """
    return math.ceil(math.log2(ranks))


def fit(points: list[Point], cores: int) -> Fit:
    """Least squares over the worlds that have a core a rank; at least over the two smallest.

    >>> seconds = {1: 1.0, 2: 3.0, 4: 5.0, 8: 99.0}
    >>> found = fit([Point(ranks, rounds_of(ranks), took, took) for ranks, took in seconds.items()], cores=4)
    >>> found.fixed, found.a_round, found.ranks
    (1.0, 2.0, (1, 2, 4))
    """
    points = sorted(points, key=lambda point: point.ranks)
    used = [point for point in points if point.ranks <= cores]
    used = used if len(used) > 1 else points[:2]
    a_round, fixed = statistics.linear_regression([p.rounds for p in used], [p.seconds for p in used])
    return Fit(fixed, a_round, tuple(point.ranks for point in used))


def alone(integers: int, calls: int) -> Point:
    """A rank without others: the work that every agreement has, whatever the number of rounds."""
    seconds = []
    for _ in range(WARMUP + calls):
        begin = time.perf_counter()
        torch.tensor(list(range(integers)), dtype=torch.int64).tolist()
        seconds.append(time.perf_counter() - begin)
    return Point(1, 0, statistics.median(seconds[WARMUP:]), max(seconds[WARMUP:]))


def agree(rank: int, world: int, store: str, integers: int, calls: int, answers: Any) -> None:
    """A rank: times its calls, and answers with their median and the slowest."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    fabric = Fabric(torch.device("cpu"), stall_timeout=PATIENCE)
    values = [rank + number for number in range(integers)]
    expected = [world - 1 + number for number in range(integers)]
    seconds = []
    for _ in range(WARMUP + calls):
        begin = time.perf_counter()
        agreed = fabric.maximum(values)
        seconds.append(time.perf_counter() - begin)
        assert agreed == expected, f"rank {rank}: {agreed[:4]}…"
    answers.put((statistics.median(seconds[WARMUP:]), max(seconds[WARMUP:])))
    dist.barrier()
    dist.destroy_process_group()


def measure(world: int, integers: int, calls: int) -> Point:
    """Starts the ranks of one world."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.agreement"])  # imported once, for all ranks
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(target=agree, args=(rank, world, store, integers, calls, answers)) for rank in range(world)
        ]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + PATIENCE
        for rank in ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        codes = [rank.exitcode for rank in ranks]
        for rank in ranks:
            rank.kill()
        if any(code != 0 for code in codes):
            sys.exit(f"{world} ranks: exit codes {codes}")
    medians, slowest = zip(*(answers.get() for _ in ranks), strict=True)
    return Point(world, rounds_of(world), max(medians), max(slowest))


def main() -> None:
    """Measures every world and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--integers", type=int, default=400)
    parser.add_argument("--calls", type=int, default=100, help="that are timed")
    parser.add_argument("--hop-latency", type=float, default=0.0, help="seconds from host to host, added to each round")
    parser.add_argument("--out", type=Path, help="write the results here as JSON too")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, torch {torch.__version__}, the maximum of {args.integers} integers", flush=True)
    print("| ranks | rounds | ms | slowest ms |", "|---|---|---|---|", sep="\n")
    points = []
    for world in [1, *args.ranks]:
        points.append(alone(args.integers, args.calls) if world == 1 else measure(world, args.integers, args.calls))
        ranks, rounds, seconds, slowest = astuple(points[-1])
        print(f"| {ranks} | {rounds} | {1e3 * seconds:.3f} | {1e3 * slowest:.3f} |", flush=True)
    found, hop = fit(points, cores), args.hop_latency
    a_round = f"({1e3 * found.a_round:.3f} ms + {1e3 * hop:.3f} ms a hop)"
    print(
        f"fixed {1e3 * found.fixed:.3f} ms + rounds × {a_round}, fitted to {', '.join(map(str, found.ranks))} ranks",
        f"{FAR} ranks, {rounds_of(FAR)} rounds: {1e3 * found.seconds(FAR, hop):.3f} ms by this model",
        sep="\n",
    )
    if args.out is not None:
        report = {"cores": cores, "torch": torch.__version__, "hop_latency": hop, "fit": asdict(found)}
        report |= {"points": [asdict(point) for point in points], str(FAR): found.seconds(FAR, hop)}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
