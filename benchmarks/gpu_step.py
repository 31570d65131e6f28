"""Time and peak memory of a training step on one GPU, side by side with plain torch and FSDP2, in one process.

    PYTHONPATH=. python benchmarks/gpu_step.py [--layers 48] [--hidden 1600] [--batch 8] [--steps 8] [--out FILE]
    PYTHONPATH=. python benchmarks/gpu_step.py --compile       # the blocks of every variant compiled, each as one graph

Worlds larger than one are fake process groups: this rank's kernels and memory are real, nothing is sent. With
``--link`` every collective takes the time that it would over that link (benchmarks/delayed_group.py).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

import zeroshard
from benchmarks.delayed_group import LINKS, DelayedGroup, delayed_world
from benchmarks.peers import fully_sharded
from zeroshard.config.job import ModelConfig
from zeroshard.train.gpt import GPT

Step = Callable[[Tensor, Tensor], None]
Build = Callable[..., Step]
"""Makes a step from a ``ModelConfig`` and, as ``backend``, what compiles the blocks; nothing does if it is empty."""


@dataclass(frozen=True)
class Result:
    """What one way of training cost."""

    name: str
    world: int
    seconds: float
    peak_gib: float
    at_rest_gib: float
    link: str = ""
    communication: float = 0.0
    """Seconds a step that the link is busy."""
    compiled: str = ""
    """The backend that compiled the blocks."""


@contextmanager
def world_of(size: int, link: str = "") -> Iterator[None]:
    """A process group of ``size`` ranks, of which this one is real, with delays if a link is given; none for one."""
    if size == 1:
        yield
        return
    with delayed_world(size, LINKS[link]):
        yield


def compile_blocks(model: GPT, backend: str) -> None:
    """Compiles each block in place, as one graph."""
    if backend:
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)


def plain(config: ModelConfig, device: str = "cuda", backend: str = "") -> Step:
    """Mixed precision by hand, all on the device: bf16 model, fp32 masters, foreach AdamW, clipping."""
    with torch.device(device):
        model = GPT(config).bfloat16()
    compile_blocks(model, backend)
    parameters = list(model.parameters())
    masters = [p.detach().float() for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, foreach=True)

    def step(tokens: Tensor, targets: Tensor) -> None:
        model(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float()  # type: ignore[union-attr]
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)

    return step


def fsdp2(config: ModelConfig, device: str = "cuda", backend: str = "") -> Step:
    """FSDP2 with bf16 compute and reduction, a group a block. Blocks are compiled first, so its hooks are outside."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    with torch.device(device):
        model = GPT(config)
    if backend:
        for number, block in enumerate(model.blocks):
            model.blocks[number] = torch.compile(block, backend=backend, fullgraph=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fully_sharded(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step(tokens: Tensor, targets: Tensor) -> None:
        model(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded(stage: int, cast_on_gather: bool = False, **options: Any) -> Build:
    """Zeroshard at one stage."""
    precision = zeroshard.Precision(parameters=torch.bfloat16, cast_on_gather=cast_on_gather)

    def build(config: ModelConfig, device: str = "cuda", backend: str = "") -> Step:
        with torch.device("meta"):
            model = GPT(config)
        compile_blocks(model, backend)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        model, optimizer = zeroshard.shard(
            model, optimizer, stage=stage, precision=precision, clip_grad_norm=1.0, device=device, **options
        )

        def step(tokens: Tensor, targets: Tensor) -> None:
            model(tokens, targets).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


def unrecomputed(build: Build) -> Build:
    """The same way of training, for a model that does not recompute its blocks itself."""

    def built(config: ModelConfig, **options: Any) -> Step:
        return build(replace(config, checkpointing=False), **options)

    return built


def measure(name: str, world: int, build: Build, config: ModelConfig, args: Any) -> Result:
    """Median over steps, by events on the device."""
    torch.manual_seed(0)
    tokens = torch.randint(0, config.vocabulary, (args.batch, config.sequence), device="cuda")
    targets = torch.randint(0, config.vocabulary, (args.batch, config.sequence), device="cuda")
    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()
    base = torch.cuda.memory_allocated()
    with world_of(world, args.link):
        step = build(config, backend=args.compile)
        for _ in range(3):
            step(tokens, targets)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        rest = torch.cuda.memory_allocated()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(args.steps + 1)]
        DelayedGroup.spent = 0.0
        events[0].record()
        for event in events[1:]:
            step(tokens, targets)
            event.record()
        torch.cuda.synchronize()
        seconds = statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))
        peak = torch.cuda.max_memory_allocated()
        if args.profile and args.profile in f"{name}@{world}":
            with torch.profiler.profile() as profile:
                step(tokens, targets)
                torch.cuda.synchronize()
            profile.export_chrome_trace(f"{args.out}.{name.replace(' ', '-')}.trace.json")
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
        del step
    gc.collect()
    sent = DelayedGroup.spent / args.steps
    memory = (peak - base) / 2**30, (rest - base) / 2**30
    return Result(name, world, seconds, *memory, args.link, sent, args.compile)


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
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--link", default="", choices=[*LINKS], help="delay collectives as over this link")
    backend = {"nargs": "?", "const": "inductor", "default": ""}
    parser.add_argument("--compile", **backend, help="compile the blocks of every variant, with this backend")
    parser.add_argument("--only", default="", help="run variants whose name contains this")
    parser.add_argument("--profile", default="", help="profile the variant name@world that contains this")
    parser.add_argument("--out", default="gpu_step.json")
    args = parser.parse_args()
    config = ModelConfig(
        layers=args.layers,
        hidden=args.hidden,
        heads=args.heads,
        sequence=args.sequence,
        vocabulary=args.vocabulary,
        checkpointing=True,
    )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Ψ = {config.parameters / 1e9:.3f}B")
    results = []
    for world in args.worlds:
        variants: list[tuple[str, Build]] = [("plain", plain)] if world == 1 else []
        variants += [("fsdp2", fsdp2)] if world > 1 else []
        variants += [(f"zeroshard stage {stage}", sharded(stage)) for stage in ((0, 3) if world == 1 else (0, 1, 2, 3))]
        if world == 1:
            as_needed = sharded(0, activations=zeroshard.Activations(recompute="auto"))
            variants.append(("plain, nothing recomputed", unrecomputed(plain)))
            variants.append(("zeroshard stage 0, recomputed as needed", unrecomputed(as_needed)))
        else:
            variants.append(("zeroshard stage 3, cast_on_gather", sharded(3, cast_on_gather=True)))
            variants.append(("zeroshard stage 3, prefetch 1", sharded(3, prefetch=1)))
        for name, build in variants:
            if args.only in name:
                try:
                    results.append(measure(name, world, build, config, args))
                except torch.cuda.OutOfMemoryError:
                    print(f"{name} @ {world}: out of memory")
                    continue
                last = results[-1]
                memory = f"peak {last.peak_gib:.2f} GiB  at rest {last.at_rest_gib:.2f}"
                if args.link:
                    memory += f"  {args.link} busy {last.communication:.4f} s"
                print(f"{name:40} world {world}: {last.seconds:.4f} s  {memory}")
    with open(args.out, "w") as file:
        json.dump([asdict(result) for result in results], file, indent=1)


if __name__ == "__main__":
    main()
