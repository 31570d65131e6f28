"""Tokens per second and peak memory of a training step on CPU ranks, beside DDP, FSDP2 and DeepSpeed, in one run.

    PYTHONPATH=. python benchmarks/cpu_step.py [--ranks 2] [--layers 6] [--hidden 384] [--rounds 9] [--out FILE.json]

Every way of training gets rank processes of its own, which live from start to end. They take turns: in each round
every one of them trains a few steps while the others sleep, so that a machine that slows down slows all of them, and
what counts is the ratio within a round. fp32, foreach AdamW and clipping everywhere; the same model, seed and tokens,
so the same loss. A peer that is not installed, or fails to start, is named and left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum, auto
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function

import zeroshard
from benchmarks.peers import deepspeed_engine, fully_sharded
from zeroshard.config.job import ModelConfig
from zeroshard.train.gpt import GPT

LEARNING_RATE = 1e-4
MAX_NORM = 1.0
SETTLING_STEPS = 3  # lazy initialisation, and the first recorded order of units
BASELINE = "fsdp2"
MEASURED = "measured step"
PATIENCE = 600.0  # seconds for one answer of a rank: DeepSpeed compiles on first use

Step = Callable[[Tensor, Tensor], Tensor]  # tokens and targets, [batch, sequence] each, to the loss
Builder = Callable[[ModelConfig], Step]


class Order(Enum):
    """What the parent asks of a rank."""

    MEASURE_MEMORY = auto()
    """In processes of its own: the record of allocations is itself memory."""
    BUILD = auto()
    TRAIN = auto()


class Variant(NamedTuple):
    """One way of training."""

    name: str
    build: Builder
    needs: str | None = None
    """The package it is in, if not torch or zeroshard."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    at_rest: int
    """Tensors alive between two steps."""
    peak: int
    """Tensors alive at once during a step, activations included."""


@dataclass(frozen=True)
class Turn:
    """What one rank measured while it was its turn."""

    seconds: float
    cpu_seconds: float
    loss: float
    resident: int
    """Peak resident memory of the process, less what it had with everything imported and nothing built."""


@dataclass(frozen=True)
class Result:
    """What one way of training cost, over all rounds."""

    name: str
    step_seconds: float
    """Median over rounds of the slowest rank's mean."""
    cpu_seconds: float
    """Processor time of a step, mean over ranks and median over rounds; hardly depends on what else is running."""
    tokens_per_second: float
    ratio: float
    """Tokens per second as a multiple of the baseline's in the same round; median over rounds."""
    ratio_low: float
    ratio_high: float
    peak_bytes: int
    at_rest_bytes: int
    resident_bytes: int
    loss: float


# -- ways of training -------------------------------------------------------------------------------------------------


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that all of them use."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=True)


def ordinary_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The loop's body as one writes it for DDP and FSDP2."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ddp(config: ModelConfig) -> Step:
    """DistributedDataParallel."""
    model = GPT(config)
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return ordinary_step(wrapped, adamw(model))


def fsdp2(config: ModelConfig) -> Step:
    """fully_shard, a group a block."""
    model = fully_sharded(GPT(config), init_device_mesh("cpu", (dist.get_world_size(),)))
    return ordinary_step(model, adamw(model))


def deepspeed(stage: int) -> Builder:
    """DeepSpeed at one stage, with torch's optimizer and buckets of a block, which is what the others use."""

    def build(config: ModelConfig) -> Step:
        model = GPT(config)
        bucket = sum(parameter.numel() for parameter in model.blocks[0].parameters())
        engine = deepspeed_engine(model, adamw(model), stage=stage, bucket=bucket, max_norm=MAX_NORM)

        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return build


def sharded(stage: int) -> Builder:
    """Zeroshard at one stage."""

    def build(config: ModelConfig) -> Step:
        model = GPT(config)
        model, optimizer = zeroshard.shard(model, adamw(model), stage=stage, clip_grad_norm=MAX_NORM)

        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return build


VARIANTS = [
    Variant("ddp", ddp),
    Variant("fsdp2", fsdp2),
    *(Variant(f"deepspeed stage {stage}", deepspeed(stage), needs="deepspeed") for stage in (1, 2, 3)),
    *(Variant(f"zeroshard stage {stage}", sharded(stage)) for stage in (0, 1, 2, 3)),
]


# -- in a rank --------------------------------------------------------------------------------------------------------


def serve(number: int, rank: int, store: str, args: argparse.Namespace, connection: Connection) -> None:
    """A rank of one variant: measures its memory, or trains whenever it is asked to."""
    try:
        warnings.filterwarnings("ignore", "`torch.distributed.*deprecated", FutureWarning)  # names that peers call
        torch.set_num_threads(args.threads)
        dist.init_process_group("gloo", store=dist.FileStore(store, args.ranks), rank=rank, world_size=args.ranks)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(args.ranks),
        }  # DeepSpeed reads them
        config = model_config(args)
        generator = torch.Generator().manual_seed(rank)
        text = torch.randint(0, config.vocabulary, (args.batch, config.sequence + 1), generator=generator)
        tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        variant = VARIANTS[number]
        if variant.needs is not None:
            importlib.import_module(variant.needs)
        torch.manual_seed(0)
        if connection.recv() is Order.MEASURE_MEMORY:
            connection.send(memory_of(variant.build, config, tokens, targets))
            connection.recv()  # lives until it is killed, so that no rank loses a peer
        base = status("VmRSS")
        step = variant.build(config)
        for _ in range(SETTLING_STEPS):
            step(tokens, targets)
        connection.send(None)
        while connection.recv() is Order.TRAIN:
            dist.barrier()
            forget_peak()
            begin, cpu_begin = time.perf_counter(), time.process_time()
            for _ in range(args.steps):
                loss = step(tokens, targets)
            dist.barrier()  # a step is over when its parameters are everywhere
            seconds = (time.perf_counter() - begin) / args.steps
            cpu_seconds = (time.process_time() - cpu_begin) / args.steps
            connection.send(Turn(seconds, cpu_seconds, loss.item(), status("VmHWM") - base))
    except BaseException:
        connection.send(traceback.format_exc())


def memory_of(build: Builder, config: ModelConfig, tokens: Tensor, targets: Tensor) -> Memory:
    """Builds a variant and trains it with every allocation of torch on record, from the first on."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = build(config)
        for _ in range(SETTLING_STEPS):
            step(tokens, targets)
        with record_function(MEASURED):
            step(tokens, targets)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    (measured,) = (event for event in events if event["name"] == MEASURED and event["ph"] == "X")
    moments = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    end = measured["ts"] + measured["dur"]
    alive = [event["args"]["Total Allocated"] for event in moments if measured["ts"] <= event["ts"] <= end]
    return Memory(at_rest=alive[-1], peak=max(alive))


def status(field: str) -> int:
    """A size from /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise KeyError(field)


def forget_peak() -> None:
    """Lets VmHWM start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


# -- in the parent ----------------------------------------------------------------------------------------------------


class Ranks:
    """The rank processes of one variant."""

    def __init__(self, number: int, args: argparse.Namespace, folder: str) -> None:
        self.name = VARIANTS[number].name
        context = multiprocessing.get_context("spawn")
        store = os.path.join(folder, uuid.uuid4().hex)
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(args.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(number, rank, store, args, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self.memory: list[Memory] = []
        self.turns: list[list[Turn]] = []

    def ask(self, order: Order) -> list[Any]:
        """Gives all ranks an order and returns their answers."""
        for connection in self._connections:
            connection.send(order)
        return [self._answer(connection) for connection in self._connections]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def seconds(self, turn: int) -> float:
        """Of one step in a round: the slowest rank's."""
        return max(rank.seconds for rank in self.turns[turn])

    def _answer(self, connection: Connection) -> Any:
        if not connection.poll(PATIENCE):
            raise RuntimeError(f"no answer within {PATIENCE:g} s")
        try:
            answer = connection.recv()
        except EOFError:
            raise RuntimeError("a rank died") from None
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer


def start_all(args: argparse.Namespace, folder: str, console: Console) -> list[Ranks]:
    """Starts one variant after the other; says which are left out, and why."""
    started = []
    for number, variant in enumerate(VARIANTS):
        if not any(wanted in variant.name for wanted in args.only):
            continue
        if variant.needs is not None and importlib.util.find_spec(variant.needs) is None:
            console.print(f"{variant.name}: left out, {variant.needs} is not installed (pip install '.\\[bench]')")
            continue
        try:
            started.append(start(number, args, folder))
        except RuntimeError as error:
            console.print(f"{variant.name}: left out, it failed:\n{error}", markup=False)
        else:
            console.print(f"{variant.name}: started", highlight=False)
    return started


def start(number: int, args: argparse.Namespace, folder: str) -> Ranks:
    """Measures a variant's memory, then starts the ranks that will train it."""
    measuring = Ranks(number, args, folder)
    try:
        memory = measuring.ask(Order.MEASURE_MEMORY)
    finally:
        measuring.close()
    ranks = Ranks(number, args, folder)
    ranks.memory = memory
    try:
        ranks.ask(Order.BUILD)
    except RuntimeError:
        ranks.close()
        raise
    return ranks


def summarise(ranks: Ranks, baseline: Ranks, tokens: int) -> Result:
    """Medians over rounds; the worst rank where ranks differ."""
    turns = range(len(ranks.turns))
    seconds = statistics.median(ranks.seconds(turn) for turn in turns)
    ratios = [baseline.seconds(turn) / ranks.seconds(turn) for turn in turns]
    return Result(
        name=ranks.name,
        step_seconds=seconds,
        cpu_seconds=statistics.median(statistics.mean(rank.cpu_seconds for rank in turn) for turn in ranks.turns),
        tokens_per_second=tokens / seconds,
        ratio=statistics.median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        peak_bytes=max(memory.peak for memory in ranks.memory),
        at_rest_bytes=max(memory.at_rest for memory in ranks.memory),
        resident_bytes=max(rank.resident for turn in ranks.turns for rank in turn),
        loss=statistics.mean(rank.loss for rank in ranks.turns[-1]),
    )


def table_of(results: list[Result], baseline: str) -> Table:
    """Results as a table to read."""
    table = Table()
    table.add_column("per rank")
    headings = [
        "step ms",
        "CPU ms",
        "tokens/s",
        f"× {baseline}",
        "in rounds",
        "peak MB",
        "at rest MB",
        "RSS MB",
        "loss",
    ]
    for heading in headings:
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result.name,
            f"{1e3 * result.step_seconds:.0f}",
            f"{1e3 * result.cpu_seconds:.0f}",
            f"{result.tokens_per_second:,.0f}",
            f"{result.ratio:.3f}",
            f"{result.ratio_low:.2f}–{result.ratio_high:.2f}",
            f"{result.peak_bytes / 1e6:.0f}",
            f"{result.at_rest_bytes / 1e6:.0f}",
            f"{result.resident_bytes / 1e6:.0f}",
            f"{result.loss:.4f}",
        )
    return table


def machine() -> str:
    """Cores, memory, processor and versions, in a line."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":")[1].strip()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {memory:.0f} GiB, {cpu}, Python {platform.python_version()}, torch {torch.__version__}"


def model_config(args: argparse.Namespace) -> ModelConfig:
    """The model's shape, from the command line."""
    return ModelConfig(layers=args.layers, hidden=args.hidden, heads=args.heads, sequence=args.sequence)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2, help="sequences of each rank")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="of each variant in a round")
    parser.add_argument("--only", nargs="+", default=[""], help="run variants whose names contain one of these")
    parser.add_argument("--out", type=Path, help="write the results here as JSON too")
    return parser.parse_args()


def main() -> None:
    """Starts the ranks, lets them take turns, prints a table."""
    args = parse_arguments()
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed's; it would warn that it found nothing else
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler would announce every start and stop in every rank
    console = Console(width=None if sys.stdout.isatty() else 120)
    config = model_config(args)
    shape = f"{args.ranks} ranks × {args.threads} threads, {args.batch} × {args.sequence} tokens each, fp32"
    console.print(machine(), f"Ψ = {config.parameters / 1e6:.1f}M, {shape}", sep="\n", highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        started = start_all(args, folder, console)
        try:
            for _ in range(args.rounds):
                for ranks in started:
                    ranks.turns.append(ranks.ask(Order.TRAIN))
        finally:
            for ranks in started:
                ranks.close()
    if not started:
        sys.exit("nothing was measured")
    baseline = next((ranks for ranks in started if ranks.name == BASELINE), started[0])
    tokens = args.ranks * args.batch * args.sequence
    results = [summarise(ranks, baseline, tokens) for ranks in started]
    console.print(table_of(results, baseline.name))
    if args.out is not None:
        settings = {name: value for name, value in vars(args).items() if name not in ("out", "only")}
        report = {"machine": machine(), "baseline": baseline.name, **settings, "results": [asdict(r) for r in results]}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
