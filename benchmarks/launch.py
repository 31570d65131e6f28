"""How long the host takes to launch a step of a model with many small parameters, beside another version.

    git worktree add /tmp/before COMMIT
    python benchmarks/launch.py --before /tmp/before

The parameters are so small that the step is nearly all launching. This process is one rank of eight without the others
(a fake group), so that no rank waits. Both versions run in turn, in processes of their own; the medians are compared.
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

HERE = Path(__file__).resolve().parent.parent
BLOCKS, LAYERS, WIDTH = 50, 20, 8
"""2,000 parameters: 20 linear layers, with bias, in each of 50 blocks."""
WARM_UP, STEPS = 3, 40


def measure(stage: int, device: str) -> float:
    """Seconds in which the host launches one step: forward, backward, step and zero_grad. The median.

    On a CPU the processor's time counts: the step's own work is small, and other processes do not disturb it.
    """
    import torch
    from torch import nn

    import zeroshard
    from zeroshard.system import compat_groups

    with compat_groups.one_rank_of(8, 0):
        block = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))) for _ in range(BLOCKS)]
        model = nn.Sequential(*block)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, sharded = zeroshard.shard(model, optimizer, stage=stage, device=device)
        x = torch.randn(4, WIDTH, device=device)
        times = []
        clock = time.process_time if device == "cpu" else time.perf_counter
        for step in range(WARM_UP + STEPS):
            begin = clock()
            model(x).square().mean().backward()
            sharded.step()
            sharded.zero_grad()
            if step >= WARM_UP:
                times.append(clock() - begin)
            if device == "cuda":
                torch.cuda.synchronize()
        return statistics.median(times)


def run(tree: Path, stage: int, device: str) -> float:
    """``measure`` in another process, with the package of another folder."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", str(stage), "--device", device]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd=tree)
    return float(json.loads(found.stdout.splitlines()[-1]))


def main() -> None:
    """Prints a line for each stage."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--before", type=lambda text: Path(text).resolve(), help="folder of the version to compare with"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", type=int, help="measure one stage of the package that is imported")
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure, arguments.device)))
        return
    for stage in arguments.stages:
        trees = {"now": HERE} | ({} if arguments.before is None else {"before": arguments.before.resolve()})
        times: dict[str, list[float]] = {name: [] for name in trees}
        for _ in range(arguments.rounds):
            for name, tree in trees.items():
                times[name].append(run(tree, stage, arguments.device))
        middle = {name: statistics.median(each) for name, each in times.items()}
        ratio = f", ratio {middle['now'] / middle['before']:.3f}" if "before" in middle else ""
        print(f"stage {stage}: " + ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in middle.items()) + ratio)


if __name__ == "__main__":
    main()
