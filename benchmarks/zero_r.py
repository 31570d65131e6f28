"""ZeRO-R on one GPU: largest model and peak cached memory of the paper's configurations C1 to C5, under a memory cap.

    PYTHONPATH=. python benchmarks/zero_r.py [--cap 32] [--world 400] [--degree 16] [--batch 16] [--out FILE]

The other ranks are a fake process group: this rank's kernels and memory are real, nothing is sent. The paper had 400
GPUs of 32 GB, 16 of which divide the matrices, and a batch of 16 (figures 6 and 7).

A model's peak grows by the same amount with every layer, so the largest that fits is found from two small ones, and
then run: it must fit, and one that is larger by `MARGIN` must not.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from zeroshard import Activations
from zeroshard.config.job import ModelConfig
from zeroshard.system import compat_groups
from zeroshard.train.gpt import GPT
from zeroshard.train.gpt.tensor_parallel import parallelise

GB = 1e9
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "C1": {"stage": 1, "defragment": True, "activations": Activations()},
    "C2": {"stage": 1, "defragment": True, "activations": Activations(partition=True)},
    "C3": {"stage": 2, "defragment": True, "activations": Activations()},
    "C4": {"stage": 2, "defragment": True, "activations": Activations(partition=True)},
    "C5": {"stage": 2, "defragment": True, "activations": Activations(partition=True, offload=True)},
}
PAPER_LARGEST = {"C1": 40, "C2": 60, "C3": 50, "C4": 140, "C5": 150}
PAPER_CACHED = {"C1": 29.5, "C2": 24, "C3": 25.3, "C4": 20, "C5": 20}
PROBES = (6, 12)
"""Layers of the two small models."""
STEPS = 2
"""The first makes the optimizer's states."""
MARGIN = 0.1


@dataclass
class Result:
    """One configuration."""

    name: str
    largest_billions: float
    """Of the largest model that fits, as it was run."""
    paper_billions: float
    too_large_billions: float | None
    """Of the next one that was tried, which did not fit; None if it did."""
    cached_gb: float
    """Peak of what torch's allocator reserved for the model of figure 7."""
    allocated_gb: float
    paper_cached_gb: float
    seconds: float


def peak_of(layers: int, arguments: argparse.Namespace, options: dict[str, Any]) -> tuple[float, float] | None:
    """Peak bytes allocated and reserved by one rank of a model; None if it does not fit."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        with compat_groups.one_rank_of(arguments.world, 0):
            _train(layers, arguments, options)
            return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    except torch.cuda.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _train(layers: int, arguments: argparse.Namespace, options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cuda", (arguments.world // arguments.degree, arguments.degree), mesh_dim_names=("d", "m"))
    config = ModelConfig(layers=layers, hidden=arguments.hidden, heads=arguments.hidden // 128, sequence=1024)
    with torch.device("meta"):
        model = GPT(config)
    parallelise(model, mesh["m"])
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = zeroshard.shard(model, optimizer, init="empty", precision="bf16", **options)
    tokens = torch.zeros(arguments.batch, 1024, dtype=torch.long, device="cuda")
    for _ in range(STEPS):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


def measure(name: str, arguments: argparse.Namespace) -> Result:
    """One configuration: the largest model, and figure 7's."""
    began, options, cap = time.perf_counter(), CONFIGURATIONS[name], arguments.cap * GB
    small, large = (peak_of(layers, arguments, options) for layers in PROBES)
    assert small is not None
    assert large is not None
    slope = (large[1] - small[1]) / (PROBES[1] - PROBES[0])
    layers = int(PROBES[1] + (cap - large[1]) / slope)
    fits = peak_of(layers, arguments, options)
    while fits is None:
        layers = int(layers * (1 - MARGIN / 2))
        fits = peak_of(layers, arguments, options)
    more = int(layers * (1 + MARGIN))
    beyond = peak_of(more, arguments, options)
    if beyond is not None:
        layers = more
    fixed = peak_of(arguments.fixed, arguments, options) or (float("nan"), float("nan"))
    return Result(
        name,
        _billions(layers, arguments.hidden),
        PAPER_LARGEST[name],
        None if beyond is not None else _billions(more, arguments.hidden),
        fixed[1] / GB,
        fixed[0] / GB,
        PAPER_CACHED[name],
        time.perf_counter() - began,
    )


def _billions(layers: int, hidden: int) -> float:
    return ModelConfig(layers=layers, hidden=hidden, heads=hidden // 128, sequence=1024).parameters / 1e9


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", type=float, default=32, help="GB of device memory (default: 32)")
    parser.add_argument("--world", type=int, default=400)
    parser.add_argument("--degree", type=int, default=16, help="of tensor parallelism")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--fixed", type=int, default=50, help="layers of figure 7's model (default: 50, 40B)")
    parser.add_argument("--only", nargs="*", default=list(CONFIGURATIONS), choices=list(CONFIGURATIONS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, arguments.cap * GB / total))
    results = []
    for name in arguments.only:
        result = measure(name, arguments)
        results.append(result)
        print(
            f"{name}: largest {result.largest_billions:.0f}B (paper {result.paper_billions}B), 40B: cached "
            f"{result.cached_gb:.1f} GB, allocated {result.allocated_gb:.1f} GB (paper {result.paper_cached_gb} GB), "
            f"{result.seconds:.0f} s",
            flush=True,
        )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(result) for result in results], indent=2))


if __name__ == "__main__":
    main()
