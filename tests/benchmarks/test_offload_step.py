"""The benchmark of a step with offload runs, small, and names the peers that it leaves out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_variants_take_their_turns_with_each_batch_and_missing_peers_are_named(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    names = ["plain", "synchronous", "8-bit moments, delayed", "torchao: bf16 without a master, no clipping"]
    command = [sys.executable, "benchmarks/offload_step.py", "--device", "cpu", "--batch", "2", "4", "--steps", "2"]
    done = subprocess.run(
        [*command, "--only", *names, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    found = [(result["name"], result["batch"]) for result in report["results"]]
    assert found == [(name, batch) for name in names[:3] for batch in (2, 4)]
    assert list(report["left out"]) == names[3:]
    assert "--device cpu" in report["about"]["command"]
    assert report["about"]["machine"].startswith("CPU, ")
    assert report["model"].startswith("GPT of 0.00B parameters, 2 layers")
    assert all(result["seconds"] > 0 for result in report["results"])
    for name in names:
        assert f"| {name} |" in done.stdout
