"""Runs as their journals say them, made of numbers that are easy to follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zeroshard.report.journal import Journal, Run, read
from zeroshard.report.summary import Summary

PARAMETERS = 1_000_000
GB = 10**9

OFFLOADED_STEP = [
    ["compute", "forward blocks.0", 0.21, 0.30],
    ["compute", "backward blocks.0", 0.30, 0.60],
    ["host update", "blocks.0", 0.0, 0.25],
    ["to the device", "blocks.0", 0.205, 0.208],
]
"""A step of 0.6 s. The update takes 0.25 s, of which the first 0.205 s are waited for."""


def head(**changes: Any) -> dict[str, Any]:
    """The line that begins a run."""
    plain = {
        "format": 1,
        "after": 0,
        "name": "small",
        "stage": 2,
        "offload": None,
        "precision": "bf16",
        "ranks": 2,
        "shards": 2,
        "device": "a device",
        "parameters": PARAMETERS,
        "padded": PARAMETERS,
        "tokens": 1000,
        "micro_batches": 1,
    }
    return plain | changes


def write(folder: Path, steps: int = 10, spans: list[list[Any]] | None = None, **changes: Any) -> Path:
    """Writes a run of steps of 0.5 s, whose loss falls from 5 by 0.1 a step."""
    journal = Journal(folder)
    journal.write("run", **head(**changes))
    for step in range(1, steps + 1):
        journal.write("step", step=step, seconds=0.5, loss=5 - 0.1 * step, lr=1e-3 / step, tokens=1000)
    journal.write("evaluation", step=steps, loss=4.5)
    journal.write("memory", step=2, device={"parameters": 2e6, "gradients": 1e6, "optimizer_states": 6e6}, host={})
    journal.write("volume", step=2, elements={"all_gather": 1e6, "reduce_scatter": 1e6}, expected=2.0, formula="2Ψ")
    journal.write("plan", rows=[row(stage, own=stage == 2) for stage in range(4)], counts_activations=True)
    if spans is not None:
        journal.write("trace", steps=[5], marks=[0.0, 0.6], spans=spans)
    journal.write("ranks", states=[9e6, 8e6], peak=[])
    journal.write("end", step=steps, reason="finished")
    journal.close()
    return folder


def row(
    stage: int, *, own: bool = False, offload: str = "none", peak: float = 12e6, fits: bool = True
) -> dict[str, Any]:
    """A row of a plan."""
    return {
        "stage": stage,
        "offload": offload,
        "own": own,
        "fits": fits,
        "at_step": {"parameters": 2e6, "gradients": 1e6, "optimizer_states": 6e6},
        "peak": {"parameters": 2e6, "activations": peak - 2e6},
        "host": 0,
        "volume": 2_000_000,
        "seconds": 0.4,
    }


def summary(folder: Path, **changes: Any) -> Summary:
    """The summary of a run that is written now."""
    return Summary(read(write(folder, **changes)))


def run(folder: Path, **changes: Any) -> Run:
    """A run that is written now."""
    return read(write(folder, **changes))
