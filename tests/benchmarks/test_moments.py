"""The benchmark of moments runs, small, and its verdict follows from its losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.moments import Run, report

ROOT = Path(__file__).parents[2]


def verdict(fp32: list[float], bf16: list[float], eight: list[float]) -> str:
    kinds = {"fp32": fp32, "bf16": bf16, "8bit": eight}
    runs = [Run(kind, seed, loss, 1.0, []) for kind, losses in kinds.items() for seed, loss in enumerate(losses)]
    return list(report(runs, 1.0))[-1]


def test_the_verdict_compares_the_means_of_kinds_with_the_spread_of_seeds() -> None:
    fp32, bf16 = [1.00, 1.02, 1.04], [1.01, 1.02, 1.03]
    assert "kinds within the spread" in verdict(fp32, bf16, [1.02, 1.03, 1.05])
    assert "kinds NOT within the spread" in verdict(fp32, bf16, [1.03, 1.05, 1.07])
    assert "kinds NOT within the spread" in verdict(fp32, bf16, [0.99, 0.97, 1.01])


@pytest.mark.slow
def test_all_kinds_train_on_the_same_batches_from_the_same_values(tmp_path: Path) -> None:
    out = tmp_path / "moments.json"
    arguments = ["--layers", "2", "--hidden", "64", "--heads", "2", "--sequence", "32", "--steps", "6", "--every", "5"]
    arguments += ["--seeds", "0", "1", "--parallel", "2", "--final-batches", "2", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "benchmarks/moments.py", *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads(out.read_text())["runs"]
    first = {(run["kind"], run["seed"]): run["curve"][0] for run in runs}
    assert len(first) == 6
    for seed in (0, 1):
        assert first["fp32", seed] == first["bf16", seed] == first["8bit", seed]
        assert [point[0] for point in runs[0]["curve"]] == [0, 5]
    assert first["fp32", 0] != first["fp32", 1]
    assert "the spread of seeds" in done.stdout
