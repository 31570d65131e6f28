"""Fragmentation of GPU memory with torch's plain allocator and with `defragment=True` (M_D), each in its own process.

    PYTHONPATH=. python benchmarks/fragmentation.py [--layers 24] [--hidden 2048] [--steps 12] [--out FILE]

Batches have lengths that change from step to step, so that what an operator needs never fits what the last one left. Of
each way: the most that was allocated and that was reserved, how much of what is reserved is free when a forward has
ended, the largest free block of that, and seconds a step. Reserved beyond allocated, in blocks that are too small, is
what ends a run that has memory left.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

GIB = 2**30
WAYS = {"plain": [], "defragment=True": ["--defragment"]}
"""Arguments of the process that measures one way."""


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """One way, in this process."""
    import torch

    import zeroshard
    from zeroshard import Activations
    from zeroshard.config.job import ModelConfig
    from zeroshard.system import compat_groups
    from zeroshard.train.gpt import GPT

    lengths = [1024, 640, 896, 512, 960, 768, 1008, 576]
    with compat_groups.one_rank_of(arguments.world, 0):
        config = ModelConfig(
            layers=arguments.layers, hidden=arguments.hidden, heads=arguments.hidden // 64, sequence=1024
        )
        with torch.device("meta"):
            model = GPT(config)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = zeroshard.shard(
            model,
            optimizer,
            init="empty",
            stage=2,
            precision="bf16",
            activations=Activations(),
            defragment=arguments.defragment,
        )
        seconds, free, blocks = [], [], []
        for step in range(arguments.steps):
            tokens = torch.zeros(arguments.batch, lengths[step % len(lengths)], dtype=torch.long, device="cuda")
            torch.cuda.synchronize()
            began = time.perf_counter()
            loss = model(tokens, tokens)
            torch.cuda.synchronize()
            paused = time.perf_counter()
            free.append(torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
            blocks.append(_largest_free(torch.cuda.memory_snapshot()))
            paused = time.perf_counter() - paused
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began - paused)
        late = slice(len(lengths) // 2, None)
        return {
            "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
            "free_after_forward_gib": max(free[late]) / GIB,
            "largest_free_block_gib": min(blocks[late]) / GIB,
            "seconds": statistics.median(seconds[late]),
        }


def _largest_free(snapshot: list[dict[str, object]]) -> int:
    sizes = [
        int(block["size"])
        for segment in snapshot
        for block in segment["blocks"]  # type: ignore[attr-defined]
        if block["state"] == "inactive"
    ]
    return max(sizes, default=0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--world", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--defragment", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(measure(arguments)))
        return
    results = {}
    environment = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    for way, chosen in WAYS.items():
        command = [sys.executable, __file__, "--inside", *chosen]
        for option in ("layers", "hidden", "batch", "world", "steps"):
            command += [f"--{option}", str(getattr(arguments, option))]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        found = results[way] = json.loads(done.stdout.splitlines()[-1])
        unused = 1 - found["allocated_gib"] / found["reserved_gib"]
        print(
            f"{way:16} allocated {found['allocated_gib']:.2f} GiB, reserved {found['reserved_gib']:.2f} GiB "
            f"({unused:.1%} of it never used), after forward {found['free_after_forward_gib']:.2f} GiB free in blocks "
            f"of up to {found['largest_free_block_gib']:.2f} GiB, {found['seconds']:.3f} s a step",
            flush=True,
        )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
