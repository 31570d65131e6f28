"""Whether moments in 16 and 8 bits train as well as moments in fp32: one GPT, real text, several seeds, side by side.

    PYTHONPATH=. python benchmarks/moments.py --parallel 3 --steps 300 --out moments.json     # one H200: about 150 s
    PYTHONPATH=. python benchmarks/moments.py --layers 2 --hidden 64 --heads 2 --steps 5      # tries it, on any machine

Each run trains a GPT of 114M parameters on bytes of the Python standard library's source, with the optimizer on the
host, bf16, fp32 masters, clipping at 1.0 and AdamW with torch's default betas. The seed decides the first values, the
order of the batches and the rounding. The three kinds of moments differ in nothing else. Losses are of files that no
run trains on.

``--parallel`` processes share the device and divide the cores. Each trains one run after the other. ``--seconds``
chooses the number of steps, the same for all runs, so that the training of all runs takes about so long.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

import zeroshard
from zeroshard.config.job import DataConfig, ModelConfig
from zeroshard.train.gpt import GPT
from zeroshard.train.gpt.corpus import Corpus

KINDS: dict[str, Any] = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": "8bit"}
WARMUP = 0.1  # share of the steps over which the learning rate rises; a cosine then lowers it to a tenth
PACE_STEPS = 8
CURVE_BATCHES = 2


@dataclass(frozen=True)
class Job:
    """What all runs have in common."""

    config: ModelConfig
    steps: int
    batch: int
    lr: float
    every: int
    """Steps from one point of the curve to the next."""
    final_batches: int


@dataclass(frozen=True)
class Run:
    """How one run went."""

    kind: str
    seed: int
    final: float
    """The held-out loss after the last step."""
    seconds: float
    curve: list[tuple[int, float, float]]
    """The step's number, the loss of the step's batch, and the loss of a few held-out batches."""


_corpus: Corpus
_cores: int


def start(folder: str, workers: Any, parallel: int) -> None:
    """Prepares a process: its own part of the cores, and the text."""
    global _corpus, _cores
    with workers.get_lock():
        number, workers.value = workers.value, workers.value + 1
    allowed = sorted(os.sched_getaffinity(0))
    mine = allowed[number * len(allowed) // parallel : (number + 1) * len(allowed) // parallel] or allowed
    os.sched_setaffinity(0, mine)
    _cores = len(mine)
    torch.set_num_threads(_cores)
    _corpus = Corpus.read(DataConfig(folder=folder))


def train(kind: str, seed: int, job: Job) -> Run:
    """Trains one model from its first values to the last step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    with device:
        model: Any = GPT(job.config)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=job.lr, weight_decay=0.1)
    offload = zeroshard.Offload(moments=KINDS[kind], seed=seed)
    model, optimizer = zeroshard.shard(
        model, optimizer, stage=2, precision="bf16", offload=offload, clip_grad_norm=1.0, device=device
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step / job.steps))
    curve = []
    begin = time.perf_counter()
    for step in range(job.steps):
        batch = _corpus.training_share(
            of_ranks=1, of_batch=job.batch, ranks=1, sequence=job.config.sequence, seed=seed, step=step, rank=0
        ).to(device)
        loss = model(batch.tokens, batch.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % job.every == 0 or step == job.steps - 1:
            curve.append((step, float(loss.detach()), held_out(model, job, device, CURVE_BATCHES)))
    final = held_out(model, job, device, job.final_batches)
    return Run(kind, seed, final, time.perf_counter() - begin, curve)


def factor(done: float) -> float:
    """The learning rate as a part of the highest, by the part of the steps that are done."""
    if done < WARMUP:
        return done / WARMUP + 0.01
    return 0.55 + 0.45 * math.cos(math.pi * (done - WARMUP) / (1 - WARMUP))


@torch.no_grad()
def held_out(model: Any, job: Job, device: torch.device, batches: int) -> float:
    """The mean loss of windows that are spread over the held-out files."""
    model.eval()
    sequence = job.config.sequence
    chosen = _corpus.held_out_batches(batches=batches, batch=job.batch, sequence=sequence, rank=0, ranks=1)
    losses: list[Tensor] = [model(batch.tokens, batch.targets).float() for batch in (b.to(device) for b in chosen)]
    model.train()
    return float(torch.stack(losses).mean())


def pace(job: Job) -> float:
    """Seconds a step, while the other processes train too."""
    job = replace(job, steps=PACE_STEPS, every=job.steps)
    train("fp32", 0, job)  # with all that is done once in a process
    return train("fp32", 0, job).seconds / PACE_STEPS


def report(runs: list[Run], seconds: float) -> Iterator[str]:
    """The table and the verdict."""
    yield f"{'moments':8} {'held-out loss by seed':40} {'mean':>8} {'spread':>8} {'seconds a run':>14}"
    finals: dict[str, list[float]] = {}
    for kind in KINDS:
        mine = [run for run in runs if run.kind == kind]
        finals[kind] = [run.final for run in mine]
        each = "  ".join(f"{loss:.4f}" for loss in finals[kind])
        took = statistics.mean(run.seconds for run in mine)
        mean, width = statistics.mean(finals[kind]), spread(finals[kind])
        yield f"{kind:8} {each:40} {mean:8.4f} {width:8.4f} {took:14.1f}"
    widest, narrowest = max(map(spread, finals.values())), min(map(spread, finals.values()))
    largest = spread([statistics.mean(losses) for losses in finals.values()])
    for kind in [kind for kind in KINDS if kind != "fp32"]:
        pairs = [mine - theirs for mine, theirs in zip(finals[kind], finals["fp32"], strict=True)]
        yield f"{kind} minus fp32, by seed: {'  '.join(f'{difference:+.4f}' for difference in pairs)}"
    within = "within" if largest <= narrowest else "NOT within"
    yield f"means of kinds differ by {largest:.4f}; losses of one kind by {narrowest:.4f} to {widest:.4f} between seeds"
    yield f"differences between kinds {within} the spread of seeds; {seconds:.0f} s in all"


def spread(losses: list[float]) -> float:
    """From the least to the largest."""
    return max(losses) - min(losses)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seconds", type=float, help="choose the steps so that training takes about so long")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time")
    parser.add_argument("--every", type=int, default=25, help="steps between points of the curves")
    parser.add_argument("--final-batches", type=int, default=32, help="held-out batches after the last step")
    parser.add_argument("--folder", default="", help="text files in place of the standard library's source")
    parser.add_argument("--out", default="moments.json")
    return parser.parse_args()


def main() -> None:
    """Trains all runs, prints a table and the verdict."""
    args = parse_arguments()
    begin = time.monotonic()
    config = ModelConfig(layers=args.layers, hidden=args.hidden, heads=args.heads, sequence=args.sequence)
    job = Job(config, args.steps, args.batch, args.lr, args.every, args.final_batches)
    cases = list(product(args.seeds, KINDS))  # the kinds of a seed run at the same time
    context = multiprocessing.get_context("spawn")
    prepare = (args.folder, context.Value("i", 0), args.parallel)
    with ProcessPoolExecutor(args.parallel, context, start, prepare) as processes:
        if args.seconds is not None:
            slowest = max(processes.map(pace, [job] * args.parallel))
            turns = math.ceil(len(cases) / args.parallel)
            job = replace(job, steps=max(2, int(args.seconds / turns / slowest)))
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
        machine = f"{where}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}"
        print(
            f"{machine}\nΨ = {config.parameters / 1e6:.1f}M, {job.steps} steps of {job.batch} × {config.sequence} "
            f"bytes, {args.parallel} runs at the same time",
            flush=True,
        )
        waiting = [processes.submit(train, kind, seed, job) for seed, kind in cases]
        runs = [future.result() for future in waiting]
    for line in report(runs, time.monotonic() - begin):
        print(line)
    with open(args.out, "w") as file:
        json.dump({"machine": machine, "job": asdict(job), "runs": [asdict(run) for run in runs]}, file, indent=1)


if __name__ == "__main__":
    main()
