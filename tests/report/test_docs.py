"""The page about reports: its code runs, its commands exist, and it names lanes and files as they are."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from zeroshard.cli.main import parser
from zeroshard.recorder.recorder import REPORT, TRACED_AFTER
from zeroshard.report.journal import FILE
from zeroshard.report.page import MOST_RUNS
from zeroshard.report.timeline import LANES, TITLES

TEXT = (Path(__file__).parents[2] / "docs/how-to/report.md").read_text()
FENCED = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def test_its_commands_exist() -> None:
    commands = [line.split("#")[0] for language, text in FENCED if language == "bash" for line in text.splitlines()]
    assert len(commands) == 2
    for command in commands:
        parser().parse_args(shlex.split(command)[1:])


def test_its_words_are_those_of_the_code() -> None:
    assert ", ".join(TITLES.get(lane, lane) for lane in LANES) in TEXT
    assert all(f"`{name}`" in TEXT for name in (FILE, REPORT))
    assert "up to eight runs" in TEXT
    assert MOST_RUNS == 8
    assert "After the steps {}, {} and {} three steps are traced".format(*TRACED_AFTER) in TEXT


@pytest.mark.slow
def test_its_loop_runs_and_ends_with_a_report(tmp_path: Path) -> None:
    (code,) = (text for language, text in FENCED if language == "python")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "zeroshard: report: runs/mine/report.html"
    assert (tmp_path / "runs/mine/record.jsonl").read_text().count('"kind": "step"') == 20
