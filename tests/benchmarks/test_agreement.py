"""The benchmark of the agreement runs, small, and its model says what it was fitted to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.agreement import Point, fit, rounds_of

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_worlds_are_measured_and_extrapolated(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    command = [sys.executable, "benchmarks/agreement.py", "--ranks", "2", "3", "--calls", "5", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert [(point["ranks"], point["rounds"]) for point in report["points"]] == [(1, 0), (2, 1), (3, 2)]
    assert report["1024"] == pytest.approx(report["fit"]["fixed"] + 10 * report["fit"]["a_round"])


def test_worlds_in_which_processes_outnumber_cores_are_not_fitted() -> None:
    points = [Point(ranks, rounds_of(ranks), 1.0 + 2 * rounds_of(ranks), 9.0) for ranks in (1, 2, 4)]
    found = fit([*points, Point(8, 3, 99.0, 99.0)], cores=4)
    assert (found.fixed, found.a_round, found.ranks) == (1.0, 2.0, (1, 2, 4))
    assert found.seconds(1024, hop=0.5) == 1 + 10 * 2.5
    assert fit(points, cores=1).ranks == (1, 2)
