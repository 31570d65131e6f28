"""Time and memory of training steps with the optimizer on the host, on one GPU, beside plain torch and peers.

    PYTHONPATH=. python benchmarks/offload_step.py --batch 8 32 --steps 4   # the table of RESULTS.md, about 4 minutes
    PYTHONPATH=. python benchmarks/offload_step.py --only "16-bit states" "half on the host"
    PYTHONPATH=. python benchmarks/offload_step.py --device cpu                           # tries it with a tiny model

With ``--out docs/pictures/data/speed.json``, ``python -m docs.pictures.draw`` makes a picture of it.

A step is timed from one ``optimizer.step()`` to the next over several steps, so an update that runs behind the next
forward is paid for. Peak memory is what torch allocated on the device; host memory is the process's resident set.

All train bf16 parameters with fp32 masters and clip to a norm of 1.0, except where a row says otherwise: with
``update_in_backward`` there is no clipping. DeepSpeed and FSDP2 get what benchmarks/nccl_step.py says. torchao's
``CPUOffloadOptimizer`` has bf16 parameters and moments, no master, and cannot clip. Each peer has a process of its own,
so that it begins with free memory, and its failure is a line of the table. A peer that is not installed is named.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import zeroshard
from benchmarks.gpu_step import Step, plain
from benchmarks.nccl_rank import environment
from benchmarks.nccl_step import Kernel
from benchmarks.nccl_variants import PEERS_OF_OFFLOAD, Job, Variant
from tests.nccl.processes import free_port
from zeroshard.config.job import ModelConfig
from zeroshard.system.trace import UPDATE
from zeroshard.train.gpt import GPT

BF16 = torch.bfloat16
SLIM: dict[str, Any] = {"moments": BF16, "split_master": True}
SMALL: dict[str, Any] = {"moments": "8bit", "split_master": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "update_in_backward": {"update_in_backward": True},
    "delayed": {"delayed_update_after": 2},
    "16-bit states": SLIM,
    "16-bit states, delayed": SLIM | {"delayed_update_after": 2},
    "8-bit moments": SMALL,
    "8-bit moments, delayed": SMALL | {"delayed_update_after": 2},
    "8-bit moments, read back, in backward": SMALL | {"read_back": True, "update_in_backward": True},
}
"""The rows of the table."""
MORE: dict[str, dict[str, Any]] = {
    "split master": {"split_master": True},
    "16-bit states, update_in_backward": SLIM | {"update_in_backward": True},
    "16-bit states, read_back": SLIM | {"read_back": True},
    "parameters on the host": {"parameters": "cpu"},
    "half on the host": {"host_fraction": 0.5},
}
"""Measured only where ``--only`` names them."""
FULL = {"layers": 48, "hidden": 1600, "heads": 25, "sequence": 1024, "vocabulary": 50304}
TINY = {"layers": 2, "hidden": 64, "heads": 2, "sequence": 32, "vocabulary": 256}
WARMUP = 4
PATIENCE = 150.0  # seconds for a peer


@dataclass(frozen=True)
class Result:
    """What one way of training cost."""

    name: str
    batch: int
    seconds: float
    tokens_a_second: float
    peak_gib: float
    host_gib: float
    loss: float
    exposed: float | None
    """With the first batch: share of a step in which only copies go on: neither the device nor the host works."""
    updating: float | None
    """With the first batch: seconds a step in which the host updates."""
    memory_speed: float
    """GB/s of a plain pass over the host's memory just before: hosts are shared, so it varies."""
    stolen: float
    """Share of the processor time that the hypervisor gave to others meanwhile."""


def offloaded(options: dict[str, Any], args: argparse.Namespace) -> Callable[[ModelConfig], Step]:
    """Zeroshard with an offload."""

    def build(config: ModelConfig) -> Step:
        with torch.device("meta"):
            model = GPT(config)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
        model, optimizer = zeroshard.shard(
            model,
            optimizer,
            stage=3 if "parameters" in options else 2,
            device=torch.device(args.device),
            precision="bf16",
            offload=zeroshard.Offload(threads=args.threads, **options),
            clip_grad_norm=None if options.get("update_in_backward") else 1.0,
        )

        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step.finish = lambda: zeroshard.synchronize(model)  # type: ignore[attr-defined]
        return step  # type: ignore[return-value]

    return build


def peer(variant: Variant, args: argparse.Namespace) -> Callable[[ModelConfig], Step]:
    """A peer's whole step."""

    def build(config: ModelConfig) -> Step:
        trainer = variant.build(Job(config, args.batch[0], torch.device(args.device)))

        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            loss = trainer.backward(tokens, targets)
            trainer.update()
            trainer.clear()
            return loss

        return step  # type: ignore[return-value]

    return build


def measure(name: str, build: Callable[[ModelConfig], Step], args: argparse.Namespace) -> Iterator[Result]:
    """For each batch the mean over steps, warm."""
    config, on_gpu = config_of(args), args.device == "cuda"
    torch.manual_seed(0)
    gc.collect()
    base = 0
    if on_gpu:
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
    speed = memory_speed(1 << 29 if on_gpu else 1 << 20)
    step = build(config)
    wait = torch.cuda.synchronize if on_gpu else getattr(step, "finish", lambda: None)
    for number, batch in enumerate(args.batch):
        shape = (batch, config.sequence)
        tokens, targets = (torch.randint(0, config.vocabulary, shape, device=args.device) for _ in range(2))
        first = number == 0
        steps = args.steps if first else args.steps // 2 + 1
        for _ in range(WARMUP if first else 1):
            loss: Any = step(tokens, targets)
        wait()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = _processor_time()
        begin = time.perf_counter()
        for _ in range(steps):
            loss = step(tokens, targets)
        wait()
        seconds = (time.perf_counter() - begin) / steps
        used = _processor_time() - before
        peak = (torch.cuda.max_memory_allocated() - base) / 2**30 if on_gpu else 0.0
        host = _resident() / 2**30
        value = float("nan") if loss is None else float(loss.detach())
        exposed = updating = None
        if first:
            with zeroshard.trace(f"{args.trace}.{name}.json" if args.trace else None) as trace:
                for _ in range(2):
                    step(tokens, targets)
            updating = sum(stop - start for start, stop in trace.busy(UPDATE)) / 2
            exposed = trace.exposed_copies()
        rate, stolen = batch * config.sequence / seconds, used.stolen / max(1, used.all)
        yield Result(name, batch, seconds, rate, peak, host, value, exposed, updating, speed, stolen)
    getattr(step, "finish", lambda: None)()  # or the update under way would hold memory that the next one counts
    del step
    gc.collect()


def config_of(args: argparse.Namespace) -> ModelConfig:
    """The model that all train."""
    return ModelConfig(**{name: getattr(args, name) for name in FULL}, tied=False, checkpointing=True)


# -- peers, each in a process of its own --------------------------------------------------------------------------


def measure_peer(number: int, port: int, args: argparse.Namespace, connection: Connection) -> None:
    """Sends each result as it comes, then None; or the text of an error."""
    os.environ.update(environment(0, 1, port))
    on_gpu, variant = args.device == "cuda", PEERS_OF_OFFLOAD[number]
    try:
        if on_gpu:
            torch.cuda.set_device(0)
        dist.init_process_group("nccl" if on_gpu else "gloo")
        for result in measure(variant.name, peer(variant, args), args):
            connection.send(result)
        connection.send(None)
    except Exception as error:
        traceback.print_exc()
        connection.send(f"{type(error).__name__}: {error}".splitlines()[0][:200])
    os._exit(0)  # nothing of a peer is waited for


def why_not(variant: Variant, args: argparse.Namespace) -> str:
    """Why a peer cannot be measured here; nothing if it can."""
    if variant.package is not None and importlib.util.find_spec(variant.package) is None:
        return f"{variant.package} is not installed (pip install '.[bench]')"
    if variant.gpu_only and args.device == "cpu":
        return "it needs a GPU"
    return Kernel().problem() if variant.compiles else ""


def run_peer(number: int, args: argparse.Namespace, results: list[Result]) -> str:
    """Measures a peer. Returns what went wrong; nothing if all went well."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=measure_peer, args=(number, free_port(), args, theirs), daemon=True)
    process.start()
    theirs.close()
    deadline = time.monotonic() + PATIENCE
    try:
        while ours.poll(max(0.0, deadline - time.monotonic())):
            answer = ours.recv()
            if not isinstance(answer, Result):
                return answer or ""
            results.append(answer)
            print(described(answer), flush=True)
        return f"no answer in {PATIENCE:g} s"
    except EOFError:
        process.join()
        return f"its process ended with code {process.exitcode}"
    finally:
        process.kill()
        process.join()


# -- the machine --------------------------------------------------------------------------------------------------


def memory_speed(elements: int) -> float:
    """GB/s of the quickest of a few plain passes over so many fp32 numbers, on all threads."""
    values = torch.ones(elements)
    best = math.inf
    for _ in range(5):
        begin = time.perf_counter()
        values.mul_(0.999)
        best = min(best, time.perf_counter() - begin)
    return 2 * values.nbytes / best / 1e9


class _ProcessorTime(NamedTuple):
    stolen: int
    all: int

    def __sub__(self, other: _ProcessorTime) -> _ProcessorTime:
        return _ProcessorTime(self.stolen - other.stolen, self.all - other.all)


def _processor_time() -> _ProcessorTime:
    with open("/proc/stat") as file:
        ticks = [int(entry) for entry in file.readline().split()[1:9]]
    return _ProcessorTime(ticks[7], sum(ticks))


def _resident() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))


def commit() -> str | None:
    """What this checkout is; None where git does not know."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


# -- the command --------------------------------------------------------------------------------------------------


def described(result: Result) -> str:
    """A result in a line."""
    traced = ""
    if result.exposed is not None and result.updating is not None:
        traced = f"copies exposed {result.exposed:.1%}  host updating {result.updating:.3f} s  "
    return (
        f"{result.name:45} {result.batch:3}  {result.seconds:.4f} s  {result.tokens_a_second:8.0f} tokens/s  "
        f"peak {result.peak_gib:.2f} GiB  host {result.host_gib:.1f} GiB  {traced}"
        f"plain pass {result.memory_speed:.0f} GB/s  stolen {result.stolen:.1%}  loss {result.loss:.4f}"
    )


def table_of(results: Sequence[Result], notes: dict[str, str]) -> str:
    """A table in Markdown: a line for each variant, columns for each batch."""
    batches = list(dict.fromkeys(result.batch for result in results))
    columns = [f"{what}, batch {batch}" for batch in batches for what in ("s a step", "tokens/s", "peak GiB")]
    columns += ["exposed copies", "host updating, s", "host GiB", ""]
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for name in dict.fromkeys([*(result.name for result in results), *notes]):
        mine = {result.batch: result for result in results if result.name == name}
        cells: list[str] = []
        for batch in batches:
            one = mine.get(batch)
            if one is None:
                cells += ["", "", ""]
            else:
                cells += [f"{one.seconds:.3f}", f"{one.tokens_a_second:.0f}", f"{one.peak_gib:.2f}"]
        traced = next((one for one in mine.values() if one.updating and one.exposed is not None), None)
        cells += ["", ""] if traced is None else [f"{traced.exposed:.1%}", f"{traced.updating:.3f}"]
        cells.append(f"{max(one.host_gib for one in mine.values()):.1f}" if mine else "")
        lines.append(f"| {name} | {' | '.join([*cells, notes.get(name, '')])} |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """The command line. The model's shape depends on the device, if it is not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a tiny model")
    for name, value in FULL.items():
        parser.add_argument(f"--{name}", type=int, help=f"{value}; {TINY[name]} with --device cpu")
    parser.add_argument(
        "--batch",
        type=int,
        nargs="+",
        default=[8],
        help="each variant trains with each of them in turn; with the later ones for fewer steps",
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="*", help="run these variants")
    parser.add_argument("--trace", help="write a trace of each variant to files that begin so")
    parser.add_argument("--out", default="offload_step.json")
    args = parser.parse_args()
    for name, value in (TINY if args.device == "cpu" else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    known = ["plain", *VARIANTS, *MORE, *(variant.name for variant in PEERS_OF_OFFLOAD)]
    if unknown := set(args.only or ()) - set(known):
        parser.error(f"unknown variants: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    args.only = set(args.only or set(known) - set(MORE))
    return args


def main() -> None:
    """Runs every variant and prints a table."""
    args = parse_arguments()
    os.environ.setdefault("DS_ACCELERATOR", args.device)
    begin, size = time.monotonic(), config_of(args).parameters / 1e9
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    machine = f"{where}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}"
    print(f"{machine}, Ψ = {size:.3f}B", flush=True)
    results: list[Result] = []
    notes: dict[str, str] = {}
    for number, variant in enumerate(PEERS_OF_OFFLOAD):
        if variant.name in args.only and (note := why_not(variant, args) or run_peer(number, args, results)):
            notes[variant.name] = f"left out: {note}"
            print(f"{variant.name}: {notes[variant.name]}", flush=True)
    builders = {"plain": partial(plain, device=args.device)}
    builders |= {name: offloaded(options, args) for name, options in (VARIANTS | MORE).items()}
    for name, build in builders.items():
        if name in args.only:
            for result in measure(name, build, args):
                results.append(result)
                print(described(result), flush=True)
    print(table_of(results, notes), f"{time.monotonic() - begin:.0f} s in all", sep="\n")
    report = {
        "about": {"command": shlex.join(["python", *sys.argv]), "machine": machine, "commit": commit()},
        "model": f"GPT of {size:.2f}B parameters, {args.layers} layers, sequences of {args.sequence} tokens",
        "results": [
            asdict(result) | {"loss": result.loss if math.isfinite(result.loss) else None} for result in results
        ],
        "left out": notes,
    }
    with open(args.out, "w") as file:
        json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
