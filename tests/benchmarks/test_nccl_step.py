"""The benchmark over NCCL ranks runs, tiny and over Gloo, and names what fails and what hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = [f"zeroshard stage {stage}" for stage in (0, 1, 2, 3)]
OURS += ["zeroshard stage 3, prefetch 1", "zeroshard stage 2, offload", "zeroshard stage 3, offload"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/nccl_step.py", "--device", "cpu", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT, env=environment)


@pytest.mark.slow
def test_variants_train_the_same_model_in_two_rounds(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = bench("--steps", "2", "--only", "ddp", "fsdp2", "zeroshard", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "fsdp2, offload: left out, it needs a GPU" in done.stdout
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == ["ddp", "fsdp2", *OURS]
    assert all(len(row["rounds"]) == 2 and not row["note"] for row in rows), done.stdout
    losses = [row["rounds"][0]["loss"] for row in rows]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-3)
    assert all(0 < turn["host_seconds"] < turn["mean_seconds"] for row in rows for turn in row["rounds"])


@pytest.mark.slow
def test_a_variant_that_fails_is_named_and_the_next_has_its_turn() -> None:
    done = bench("--heads", "3", "--only", "ddp", "zeroshard stage 0")  # 3 heads do not divide the hidden size
    assert "2 ranks: ddp failed in round 1: rank 0: RuntimeError: shape" in done.stdout
    assert "2 ranks: zeroshard stage 0 failed in round 1: rank 0: RuntimeError: shape" in done.stdout
    assert done.stderr.strip().endswith("nothing was measured")


@pytest.mark.slow
def test_a_variant_that_hangs_is_named_and_the_next_has_new_processes() -> None:
    done = bench("--patience", "0.01", "--only", "ddp", "zeroshard stage 0")
    assert "2 ranks: ddp ended its world in round 1: no answer of rank 0, 1 in time" in done.stdout
    assert "2 ranks: zeroshard stage 0 ended its world in round 1: no answer of rank 0, 1 in time" in done.stdout
    assert done.stdout.count("2 ranks on CPU, ready") == 2
    assert done.returncode == 1
