"""Saving and loading compared with torch.distributed.checkpoint, and how long an asynchronous save stops training.

    python benchmarks/checkpoint.py [--parameters 40] [--ranks 2] [--rounds 5] [--device cuda] [--folder DIR]
                                    [--out FILE.json]

Both checkpoints have the same contents: fp32 parameters and AdamW's two moments, 12 bytes a parameter, divided among
the ranks; zeroshard in stage 3, torch under FSDP2. The two take turns. The result is the ratio within a round: below 1
zeroshard is faster. In both, every file is on the disk when a save counts as done. A load reads what was just written,
so mostly from memory, and fills a model and an optimizer that are there. zeroshard computes all checksums when it saves
and checks them when it loads.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import zeroshard

WIDTH = 1024


def model_of(millions: float) -> nn.Module:
    """Layers of one width, with this many millions of parameters in all."""
    layers = max(2, round(millions * 1e6 / (WIDTH * WIDTH + WIDTH)))
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step, so that the optimizer has states."""
    model(torch.randn(2, WIDTH, device=next(model.parameters()).device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def timed(what: Callable[[], Any]) -> float:
    """The seconds that the slowest rank takes."""
    dist.barrier()
    begin = time.perf_counter()
    what()
    on = "cpu" if dist.get_backend() == "gloo" else "cuda"
    seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=on)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def work(rank: int, asked: argparse.Namespace, folder: str, store: str, results: str) -> None:
    """One rank."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // asked.ranks))
    backend = "gloo" if asked.device == "cpu" else "nccl"
    device = torch.device(asked.device) if asked.device == "cpu" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=dist.FileStore(store, asked.ranks), rank=rank, world_size=asked.ranks)
    rounds = measure(rank, asked, folder, device)
    gc.collect()  # the models go before the groups that they talk through
    if rank == 0:
        Path(results).write_text(json.dumps(rounds))
    dist.barrier()
    dist.destroy_process_group()


def measure(rank: int, asked: argparse.Namespace, folder: str, device: torch.device) -> list[dict[str, float]]:
    """Measures both kinds of checkpoint in turn, round by round."""
    ours = model_of(asked.parameters).to(device)
    ours, optimizer = zeroshard.shard(ours, torch.optim.AdamW(ours.parameters()), stage=3)
    theirs = model_of(asked.parameters).to(device)
    for layer in theirs:
        fully_shard(layer)
    fully_shard(theirs)
    other = torch.optim.AdamW(theirs.parameters())
    step(ours, optimizer)
    step(theirs, other)

    def save_theirs() -> None:
        weights, states = get_state_dict(theirs, other)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/theirs")

    def load_theirs() -> None:
        weights, states = get_state_dict(theirs, other)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/theirs")
        set_state_dict(theirs, other, model_state_dict=weights, optim_state_dict=states)

    def asynchronously() -> None:
        nonlocal saving
        saving = zeroshard.save(f"{folder}/ours", ours, optimizer, asynchronous=True)

    saving: Any = None
    rounds: list[dict[str, float]] = []
    for number in range(asked.rounds + 1):
        if rank == 0:
            shutil.rmtree(f"{folder}/theirs", ignore_errors=True)
            shutil.rmtree(f"{folder}/ours", ignore_errors=True)
        dist.barrier()
        turns: list[tuple[str, Callable[[], Any]]] = [
            ("save, torch", save_theirs),
            ("save, zeroshard", lambda: zeroshard.save(f"{folder}/ours", ours, optimizer)),
            ("load, torch", load_theirs),
            ("load, zeroshard", lambda: zeroshard.load(f"{folder}/ours", ours, optimizer)),
        ]
        if number % 2:  # so that neither always finds an idle disk
            turns = [turns[1], turns[0], turns[3], turns[2]]
        found = {name: timed(turn) for name, turn in turns}
        if rank == 0:
            shutil.rmtree(f"{folder}/ours")
        found["stall, asynchronous"] = timed(asynchronously)
        saving.wait()
        if number:  # the first round also pays for memory and for code
            rounds.append(found)
        if rank == 0:
            told = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found.items())
            print(f"round {number} of {asked.rounds}: {told}", file=sys.stderr, flush=True)
    return rounds


def ratios(rounds: list[dict[str, float]], of: str, to: str) -> list[float]:
    """The ratio of two measurements in every round, the smallest first."""
    return sorted(found[of] / found[to] for found in rounds)


def main() -> None:
    """Run the ranks and show the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=40, metavar="MILLIONS")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU for each rank")
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="write all numbers here")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        results = f"{folder}/rounds.json"
        multiprocessing.spawn(work, args=(asked, folder, f"{folder}/store", results), nprocs=asked.ranks)
        rounds = json.loads(Path(results).read_text())
    size = 12e6 * asked.parameters
    table = Table(title=f"{asked.parameters:g}M parameters, {size / 1e9:.2f} GB, {asked.ranks} ranks, medians")
    for column in ("", "seconds", "GB/s", "beside", "ratio", "range"):
        table.add_column(column, justify="left" if column in ("", "beside") else "right")
    for name, beside in (
        ("save, torch", None),
        ("save, zeroshard", "save, torch"),
        ("load, torch", None),
        ("load, zeroshard", "load, torch"),
        ("stall, asynchronous", "save, zeroshard"),
    ):
        seconds = statistics.median(found[name] for found in rounds)
        cells = [name, f"{seconds:.3f}", f"{size / seconds / 1e9:.2f}"]
        if beside is not None:
            found = ratios(rounds, name, beside)
            cells += [beside, f"{statistics.median(found):.3f}", f"{found[0]:.3f}–{found[-1]:.3f}"]
        table.add_row(*cells)
    Console().print(table)
    if asked.out is not None:
        asked.out.write_text(
            json.dumps({"parameters": asked.parameters, "ranks": asked.ranks, "rounds": rounds}, indent=2)
        )


if __name__ == "__main__":
    main()
