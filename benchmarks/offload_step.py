"""Time and memory of training steps with the optimizer on the host, on one GPU, side by side with plain torch.

    PYTHONPATH=. python benchmarks/offload_step.py [--batch 8] [--layers 48] [--hidden 1600] [--only NAME] [--out FILE]

A step is timed from one ``optimizer.step()`` to the next over several steps, so an update that runs behind the next
forward is paid for. Peak memory is what torch allocated on the device; host memory is the process's resident set.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import zeroshard
from benchmarks.gpu_step import Step, plain
from zeroshard.config.job import ModelConfig
from zeroshard.system.trace import UPDATE
from zeroshard.train.gpt import GPT

BF16 = torch.bfloat16
VARIANTS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "split master": {"split_master": True},
    "update_in_backward": {"update_in_backward": True},
    "delayed": {"delayed_update_after": 2},
    "16-bit states": {"moments": BF16, "split_master": True},
    "16-bit states, delayed": {"moments": BF16, "split_master": True, "delayed_update_after": 2},
    "16-bit states, update_in_backward": {"moments": BF16, "split_master": True, "update_in_backward": True},
    "16-bit states, read_back": {"moments": BF16, "split_master": True, "read_back": True},
    "parameters on the host": {"parameters": "cpu"},
    "half on the host": {"host_fraction": 0.5},
}


@dataclass(frozen=True)
class Result:
    """What one way of training cost."""

    name: str
    seconds: float
    tokens_a_second: float
    peak_gib: float
    host_gib: float
    loss: float
    exposed: float
    """Share of a step in which copies are all that happens: neither the device nor the host works."""
    updating: float
    """Seconds a step in which the host updates."""
    memory_speed: float
    """GB/s of a plain pass over the host's memory just before: hosts are shared, so it varies."""
    stolen: float
    """Share of the processor time that the hypervisor gave to others meanwhile."""


def offloaded(options: dict[str, Any], threads: int | None) -> Callable[[ModelConfig], Step]:
    """Zeroshard with an offload."""

    def build(config: ModelConfig) -> Step:
        with torch.device("meta"):
            model = GPT(config)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
        model, optimizer = zeroshard.shard(
            model,
            optimizer,
            stage=3 if "parameters" in options else 2,
            precision="bf16",
            offload=zeroshard.Offload(threads=threads, **options),
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


def measure(name: str, build: Callable[[ModelConfig], Step], config: ModelConfig, args: Any) -> Result:
    """The mean over steps, warm."""
    torch.manual_seed(0)
    shape = (args.batch, config.sequence)
    tokens, targets = (torch.randint(0, config.vocabulary, shape, device="cuda") for _ in range(2))
    gc.collect()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    speed = memory_speed()
    step = build(config)
    for _ in range(4):
        loss: Any = step(tokens, targets)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = _processor_time()
    begin = time.perf_counter()
    for _ in range(args.steps):
        loss = step(tokens, targets)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / args.steps
    used = _processor_time() - before
    peak = (torch.cuda.max_memory_allocated() - base) / 2**30
    host = _resident() / 2**30
    value = float("nan") if loss is None else float(loss.detach())
    with zeroshard.trace(f"{args.trace}.{name}.json" if args.trace else None) as trace:
        for _ in range(3):
            step(tokens, targets)
    getattr(step, "finish", lambda: None)()  # or the update under way would hold memory that the next one counts
    del step
    gc.collect()
    updating = sum(stop - start for start, stop in trace.busy(UPDATE)) / 3
    rate = args.batch * config.sequence / seconds
    return Result(
        name, seconds, rate, peak, host, value, trace.exposed_copies(), updating, speed, used.stolen / used.all
    )


def memory_speed() -> float:
    """GB/s of the quickest of a few plain passes over 2 GiB, on all threads."""
    values = torch.ones(1 << 29)
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


def main() -> None:
    """Runs every variant and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--hidden", type=int, default=1600)
    parser.add_argument("--heads", type=int, default=25)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="*", help="run these variants")
    parser.add_argument("--trace", help="write a trace of each variant to files that begin so")
    parser.add_argument("--out", default="offload_step.json")
    args = parser.parse_args()
    config = ModelConfig(
        layers=args.layers,
        hidden=args.hidden,
        heads=args.heads,
        sequence=args.sequence,
        vocabulary=args.vocabulary,
        tied=False,
        checkpointing=True,
    )
    builders = {"plain": plain} | {name: offloaded(options, args.threads) for name, options in VARIANTS.items()}
    unknown = set(args.only or ()) - set(builders)
    if unknown:
        parser.error(f"unknown variants: {', '.join(sorted(unknown))}; known: {', '.join(builders)}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Ψ = {config.parameters / 1e9:.3f}B")
    results = []
    for name, build in builders.items():
        if args.only is None or name in args.only:
            results.append(measure(name, build, config, args))
            last = results[-1]
            print(
                f"{name:36} {last.seconds:.4f} s  {last.tokens_a_second:8.0f} tokens/s  peak {last.peak_gib:.2f} GiB  "
                f"host {last.host_gib:.1f} GiB  copies exposed {last.exposed:.1%}  "
                f"host updating {last.updating:.3f} s  plain pass {last.memory_speed:.0f} GB/s  "
                f"stolen {last.stolen:.1%}",
                flush=True,
            )
    with open(args.out, "w") as file:
        json.dump([asdict(result) for result in results], file, indent=1)


if __name__ == "__main__":
    main()
