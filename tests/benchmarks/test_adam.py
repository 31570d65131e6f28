"""The benchmark of the host optimizer runs, small, and measures what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_all_that_are_installed_take_their_turns(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = subprocess.run(
        [
            sys.executable,
            "benchmarks/adam.py",
            "--parameters",
            "0.2",
            "--rounds",
            "3",
            "--threads",
            "1",
            "--out",
            str(out),
        ],
        capture_output=True,
        text=True,
        timeout=300,  # DeepSpeed, where it is, compiles on first use
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    results = {result["name"]: result for result in report["results"]}
    ours = results["zeroshard"]
    assert (report["threads"], report["parameters"]) == (1, 200_000)
    assert ours["ratio"] == 1
    assert ours["gigabytes_per_second"] == pytest.approx(28 / ours["nanoseconds_per_parameter"])
    assert {"zeroshard, 16-bit moments", "zeroshard, 8-bit moments", "torch fused + casts", "triad"} <= set(results)
    assert all(0 < results[name]["of_plain_pass"] <= 1 for name in ("copy", "triad", "scale in place"))
    assert ours["of_plain_pass"] > 0
