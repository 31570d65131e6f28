"""What it costs to keep activation checkpoints on the host: a step with and without, on one GPU.

    PYTHONPATH=. python benchmarks/activation_offload.py [--layers 48] [--hidden 1600] [--batch 8] [--sequence 8192]

The two ways take turns, so that a clock that changes changes for both.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from pathlib import Path

import torch

import zeroshard
from zeroshard import Activations
from zeroshard.config.job import ModelConfig
from zeroshard.runtime import runtime_of
from zeroshard.train.gpt import GPT

GIB = 2**30
WAYS = {"on the device": Activations(), "on the host": Activations(offload=True)}


def measure(way: str, arguments: argparse.Namespace) -> tuple[list[float], float, float]:
    """Seconds of each step, peak GiB of the device, GiB of the host."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    heads = arguments.hidden // 64
    config = ModelConfig(layers=arguments.layers, hidden=arguments.hidden, heads=heads, sequence=arguments.sequence)
    with torch.device("meta"):
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = zeroshard.shard(model, optimizer, stage=0, precision="bf16", activations=WAYS[way])
    tokens = torch.randint(0, 256, (arguments.batch, arguments.sequence), device="cuda")
    seconds = []
    for step in range(arguments.steps + 2):  # the first two allocate and pin
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        if step >= 2:
            seconds.append(begin.elapsed_time(end) / 1000)
    checkpoints = runtime_of(model).checkpoints
    assert checkpoints is not None
    host = checkpoints.stores.host
    return seconds, torch.cuda.max_memory_allocated() / GIB, 0.0 if host is None else host.bytes / GIB


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--hidden", type=int, default=1600)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    memory = {}
    for _ in range(arguments.turns):
        for way in WAYS:
            found, device, host = measure(way, arguments)
            seconds[way] += found
            memory[way] = (device, host)
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    for way, median in medians.items():
        device, host = memory[way]
        print(f"checkpoints {way}: {median:.3f} s a step, peak {device:.2f} GiB, {host:.2f} GiB on the host")
    print(f"on the host it takes {medians['on the host'] / medians['on the device'] - 1:+.1%}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"seconds": seconds, "memory": memory}, indent=2))


if __name__ == "__main__":
    main()
