"""The benchmark of checkpoints runs, small, and measures what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_both_take_their_turns(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    arguments = ["--parameters", "4", "--rounds", "2", "--folder", str(tmp_path), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "benchmarks/checkpoint.py", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    rounds = json.loads(out.read_text())["rounds"]
    assert len(rounds) == 2
    assert all(seconds > 0 for found in rounds for seconds in found.values())
    assert "load, zeroshard" in done.stdout
