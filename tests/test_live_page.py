"""The commands of docs/live.md exist, and its programs run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from zeroshard.cli.main import parser

ROOT = Path(__file__).parents[1]
FENCED = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "docs/live.md").read_text(), re.DOTALL | re.MULTILINE)
COMMANDS = [line for language, text in FENCED if not language for line in text.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one_that_exists(command: str) -> None:
    program, *arguments = shlex.split(command, comments=True)
    assert program == "zeroshard"
    given = parser().parse_args(arguments)
    assert given.json or given.log or given.set


@pytest.mark.slow
def test_the_programs_run_and_print_waits_and_the_result_of_a_run(tmp_path: Path) -> None:
    programs = [text for language, text in FENCED if language == "python"]
    assert len(programs) == 2
    told = ""
    for program in programs:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        told += done.stdout
    assert re.search(r"'host_update': \d", told)
    assert "weights: runs/followed/model.safetensors" in told
