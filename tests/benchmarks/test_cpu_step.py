"""The CPU benchmark runs, small, and measures what it says."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = ["--layers", "2", "--hidden", "64", "--heads", "2", "--sequence", "32", "--rounds", "2", "--steps", "1"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/cpu_step.py", *TINY, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, cwd=ROOT, env=environment)


@pytest.mark.slow
def test_variants_train_the_same_model_and_stage_3_keeps_its_share_of_it(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = bench("--only", "ddp", "fsdp2", "zeroshard stage 3", "--out", str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    ddp, fsdp2, sharded = report["results"]
    assert (ddp["name"], fsdp2["name"], sharded["name"]) == ("ddp", "fsdp2", "zeroshard stage 3")
    assert ddp["loss"] == pytest.approx(sharded["loss"], rel=1e-5)
    assert fsdp2["loss"] == pytest.approx(sharded["loss"], rel=1e-5)
    assert fsdp2["ratio"] == 1
    states = 12 * 110_000 / 2  # parameters and two moments, halved; embeddings and norms come on top
    assert states < sharded["at_rest_bytes"] < sharded["peak_bytes"]
    # The share it keeps, and what the end of a step has gathered for the next forward: the root and one block, in fp32,
    # and at most half a block in a message under way.
    root, block = 256 * 64 + 32 * 64 + 2 * 64, 12 * 64**2 + 13 * 64
    assert sharded["at_rest_bytes"] < 0.6 * ddp["at_rest_bytes"] + 4 * (root + block) + 4 * block / 2


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_a_peer_that_is_not_installed_is_named() -> None:
    done = bench("--only", "deepspeed stage 2")
    assert done.returncode == 1
    assert "deepspeed stage 2: left out, deepspeed is not installed (pip install '.[bench]')" in done.stdout
    assert done.stderr.strip() == "nothing was measured"
