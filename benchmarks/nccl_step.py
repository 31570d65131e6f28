"""Seconds of a training step over NCCL ranks that share one GPU, beside DDP, FSDP2 and DeepSpeed, in turns in one run.

    PYTHONPATH=. python benchmarks/nccl_step.py --ranks 2 4 [--layers 24] [--hidden 1024] [--only NAME ...] [--out FILE]
    PYTHONPATH=. python benchmarks/nccl_step.py --device cpu      # tries everything with a tiny model, over Gloo

Every rank is a process that NCCL takes for a host of its own, so ranks talk over sockets. Under MPS they run at the
same time. The processes of a world live from start to end. Each variant is built, trained and discarded in turn, and
once more in a second, shorter round: where the two medians differ, the machine drifted. The slowest rank counts.

All variants have the same model, seed and tokens, bf16 parameters and gradients, bf16 reduction, clipping at 1.0,
torch's fused AdamW and the same number of host threads. Beyond that:

- DDP: a bf16 model, fp32 masters by hand with one foreach copy each way, gradients as views of buckets.
- FSDP2: a group a block, fp32 shards, `MixedPrecisionPolicy` with bf16 parameters and reduction. Offload:
  `CPUOffloadPolicy` with pinned memory, fused AdamW on the host.
- DeepSpeed: bf16 with fp32 masters, `overlap_comm`, contiguous gradients, buckets of 5e7 elements (those of its
  tutorial). Offload: pinned memory and DeepSpeedCPUAdam, which is compiled before anything is measured. Its masters
  start from parameters that were rounded to bf16, so its loss differs a little from the others'.
- zeroshard: the defaults, except for the options in a row's name.

*step()* is the host's time inside `optimizer.step()`. A host that is far ahead of the device waits there for a place in
the device's queue, so *alone* is the same where the device has nothing else to do. For DDP and FSDP2 clipping is in it,
for DeepSpeed it is `engine.step()`. A variant that fails or hangs is named, and the others go on, after a hang in new
processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.nccl_rank import Measured, Turn, serve
from benchmarks.nccl_variants import VARIANTS, Job
from tests.nccl.processes import free_port
from zeroshard.config.job import ModelConfig

FULL = {"layers": 24, "hidden": 1024, "heads": 16, "sequence": 1024, "vocabulary": 50304, "batch": 4}
TINY = {"layers": 2, "hidden": 64, "heads": 2, "sequence": 32, "vocabulary": 256, "batch": 2}
START_PATIENCE = 120.0  # seconds for imports, and for CUDA and NCCL to start
BUILD_PATIENCE = 180.0  # seconds for DeepSpeed's kernel
GRACE = 10.0  # seconds for the others to fail too, once a rank has failed
ROUNDS = 2
WARMUP = 2  # steps: optimizer states and the order of units come with the first one
CORES = len(os.sched_getaffinity(0))
BEGIN = time.monotonic()
MPS = "nvidia-cuda-mps-control"
BUILD = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load(verbose=False)"


@dataclass
class Row:
    """A variant in one world."""

    ranks: int
    name: str
    rounds: list[Measured] = field(default_factory=list)
    note: str = ""
    """Why a round is missing."""


class VariantError(RuntimeError):
    """A variant failed, and every rank has said so or is done: the next variant can be tried."""


class WorldError(RuntimeError):
    """A rank died or does not answer: nothing more can be measured in this world."""


class World:
    """The rank processes of one world."""

    def __init__(self, size: int, job: Job) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self._ranks: dict[Connection, int] = {}
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, size, port, job, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks[ours] = rank
            self._processes.append(process)

    def answers(self, patience: float) -> list[Any]:
        """One answer of each rank, in rank order."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + patience
        while len(found) < len(self._ranks):
            missing = [connection for connection, rank in self._ranks.items() if rank not in found]
            ready = wait(missing, max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = ", ".join(str(self._ranks[connection]) for connection in missing)
                raise WorldError(f"no answer of rank {silent} in time" + "".join(f"; {text}" for text in failed(found)))
            for connection in missing:
                if connection in ready:
                    rank = self._ranks[connection]
                    try:
                        found[rank] = connection.recv()
                    except EOFError:
                        raise WorldError(f"rank {rank} died") from None
                    if failed(found):
                        deadline = min(deadline, time.monotonic() + GRACE)
        return [found[rank] for rank in sorted(found)]

    def take(self, turn: Turn, patience: float) -> Measured:
        """One turn of a variant, on all ranks."""
        for connection in self._ranks:
            connection.send(turn)
        found = dict(enumerate(self.answers(patience)))
        for text in failed(found):
            raise VariantError(text)
        each = list(found.values())
        worst = {name: max(getattr(one, name) for one in each) for name in Measured.__dataclass_fields__}
        return Measured(**worst | {"loss": statistics.mean(one.loss for one in each)})

    def end(self, patience: float = GRACE) -> None:
        """Lets the ranks leave, and kills those that do not."""
        deadline = time.monotonic() + patience
        for connection in self._ranks:
            with suppress(OSError):  # the rank may have died
                connection.send(None)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()


def failed(answers: dict[int, Any]) -> list[str]:
    """The errors among the answers to a turn, by rank."""
    return [f"rank {rank}: {answer}" for rank, answer in sorted(answers.items()) if isinstance(answer, str)]


class Kernel:
    """DeepSpeed's host optimizer, compiled in a process of its own: ranks would all compile it at once."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", BUILD], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._problem: str | None = None

    def problem(self) -> str:
        """Waits until it is compiled. Returns why it could not be compiled; nothing if it could."""
        if self._problem is None:
            try:
                printed, _ = self._process.communicate(timeout=BUILD_PATIENCE)
                lines = printed.decode(errors="replace").strip().splitlines()
                self._problem = f"its kernel did not compile: {lines[-1:]}" if self._process.returncode else ""
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._problem = f"its kernel did not compile in {BUILD_PATIENCE:g} s"
        return self._problem


@contextmanager
def multi_process_service(wanted: bool) -> Iterator[None]:
    """Lets the ranks of a world use the GPU at the same time. Each world has its own: a killed rank may break it."""
    silent: dict[str, Any] = {"check": False, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = wanted and subprocess.run([MPS, "-d"], **silent).returncode == 0
    if wanted and not started:
        print(f"{MPS} -d failed: if no service runs already, ranks take turns on the GPU", flush=True)
    try:
        yield
    finally:
        if started:
            with suppress(subprocess.TimeoutExpired):
                subprocess.run([MPS], input=b"quit\n", timeout=GRACE, **silent)


def run_world(world: World, rows: dict[int, Row], args: argparse.Namespace, deadline: float) -> None:
    """All variants in turn, twice. Begins no turn of the second round after the deadline."""
    for number in range(1, ROUNDS + 1):
        steps = args.steps if number == 1 else max(2, args.steps // 2)
        for variant, row in rows.items():
            if row.note or len(row.rounds) >= number:
                continue
            if number > 1 and time.monotonic() > deadline:
                row.note = "no time for round 2"
                continue
            try:
                row.rounds.append(world.take(Turn(variant, WARMUP, steps), args.patience))
                print(f"{row.ranks} ranks, round {number}: {row.name:30} {described(row.rounds[-1])}", flush=True)
            except VariantError as error:
                row.note = f"failed in round {number}: {error}"
                print(f"{row.ranks} ranks: {row.name} {row.note}", flush=True)
            except WorldError as error:
                row.note = f"ended its world in round {number}: {error}"
                print(f"{row.ranks} ranks: {row.name} {row.note}", flush=True)
                raise


def measure_world(
    rows: dict[int, Row], job: Job, args: argparse.Namespace, kernel: Kernel | None, share: float
) -> bool:
    """Starts the ranks of one world and measures what is left to measure in it.

    ``share``: this world's part of the time that is left. Returns True if a variant has ended the world. The remaining
    variants then need a new world.
    """
    ranks = next(iter(rows.values())).ranks
    os.environ["OMP_NUM_THREADS"] = str(max(1, CORES // ranks))
    with multi_process_service(args.device == "cuda" and not args.no_mps and shutil.which(MPS) is not None):
        world = World(ranks, job)
        patience, device = 0.0, ""
        try:
            device = world.answers(START_PATIENCE)[0].device
            for number, row in rows.items():
                if kernel is not None and VARIANTS[number].compiles:
                    row.note = row.note or kernel.problem()
            now = time.monotonic()
            print(f"{ranks} ranks on {device}, ready after {now - BEGIN:.0f} s", flush=True)
            run_world(world, rows, args, now + share * (BEGIN + args.seconds - now))
            patience = GRACE
        except WorldError as error:
            for row in rows.values():
                row.note = row.note or ("" if device else f"the ranks did not start: {error}")
            return any(not row.note and len(row.rounds) < ROUNDS for row in rows.values())
        finally:
            world.end(patience)
    return False


def described(found: Measured) -> str:
    """Figures in a line."""
    host = f"step() {1e3 * found.host_seconds:.1f} ms, at most {1e3 * found.host_seconds_max:.1f}"
    host += f", alone {1e3 * found.launch_seconds:.1f}"
    seconds = f"{found.seconds:.4f} s (mean {found.mean_seconds:.4f})"
    return f"{seconds}  {host}  {found.peak_gib:.2f} GiB  loss {found.loss:.4f}"


def table_of(rows: Sequence[Row]) -> str:
    """A table in Markdown."""
    lines = [
        "| ranks | | s a step, round 1 | round 2 | step() ms | at most | alone | peak GiB | loss | |",
        "|---|" + "---|" * 9,
    ]
    for row in rows:
        first = row.rounds[0] if row.rounds else None
        cells = [f"{one.seconds:.4f}" for one in row.rounds] + [""] * (ROUNDS - len(row.rounds))
        if first is not None:
            host = max(one.host_seconds_max for one in row.rounds)
            cells += [f"{1e3 * first.host_seconds:.1f}", f"{1e3 * host:.1f}", f"{1e3 * first.launch_seconds:.1f}"]
            cells += [f"{first.peak_gib:.2f}", f"{first.loss:.4f}"]
        lines.append(f"| {row.ranks} | {row.name} | {' | '.join(cells + [''] * (7 - len(cells)))} | {row.note} |")
    return "\n".join(lines)


def chosen(args: argparse.Namespace) -> list[int]:
    """The variants to measure, by number. Says which are left out, and why."""
    numbers = []
    for number, variant in enumerate(VARIANTS):
        if not any(wanted in variant.name for wanted in args.only):
            continue
        if variant.package is not None and importlib.util.find_spec(variant.package) is None:
            print(f"{variant.name}: left out, {variant.package} is not installed (pip install '.[bench]')")
        elif variant.gpu_only and args.device == "cpu":
            print(f"{variant.name}: left out, it needs a GPU")
        else:
            numbers.append(number)
    return numbers


def parse_arguments() -> argparse.Namespace:
    """The command line. The model's shape depends on the device, if it is not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a tiny model over Gloo")
    for name, value in FULL.items():
        parser.add_argument(f"--{name}", type=int, help=f"{value}; {TINY[name]} with --device cpu")
    parser.add_argument("--steps", type=int, default=6, help="timed in the first round; half as many in the second")
    parser.add_argument("--only", nargs="+", default=[""], help="run variants whose names contain one of these")
    parser.add_argument("--no-mps", action="store_true", help="do not start NVIDIA's multi-process service")
    parser.add_argument("--patience", type=float, default=45.0, help="seconds after which a variant hangs")
    parser.add_argument("--seconds", type=float, default=190.0, help="begin no second round of a variant later")
    parser.add_argument("--out", type=Path, help="write the results here as JSON too")
    args = parser.parse_args()
    for name, value in (TINY if args.device == "cpu" else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> None:
    """Measures world after world and prints a table."""
    args = parse_arguments()
    os.environ.setdefault("DS_ACCELERATOR", args.device)
    shape = {name: getattr(args, name) for name in FULL if name != "batch"}
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    job = Job(ModelConfig(**shape), args.batch, device)
    size = f"Ψ = {job.config.parameters / 1e6:.1f}M, {args.batch} × {args.sequence} tokens a rank, bf16"
    print(f"{CORES} cores, torch {torch.__version__}, {size}", flush=True)
    numbers = chosen(args)
    kernel = Kernel() if any(VARIANTS[number].compiles for number in numbers) else None
    rows: list[Row] = []
    for index, ranks in enumerate(args.ranks if numbers else []):
        here = {number: Row(ranks, VARIANTS[number].name) for number in numbers}
        rows += here.values()
        share = ranks / sum(args.ranks[index:])  # a step takes longer where more ranks share the GPU
        while measure_world(here, job, args, kernel, share):
            pass
    print(table_of(rows), f"{time.monotonic() - BEGIN:.0f} s in all", sep="\n", flush=True)
    if args.out is not None:
        settings = {name: value for name, value in vars(args).items() if name != "out"}
        report = {"torch": torch.__version__, "cores": CORES, **settings, "rows": [asdict(row) for row in rows]}
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if not any(row.rounds for row in rows):
        sys.exit("nothing was measured")


if __name__ == "__main__":
    main()
