"""The README's commands exist and its code runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from zeroshard.cli.main import parser
from zeroshard.config.job import presets

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FENCED = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
BLOCKS = [text for language, text in FENCED if not language]
COMMANDS = [
    line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines() if line.startswith("zeroshard")
]


def test_the_two_commands_come_first() -> None:
    assert [line.split("#")[0].strip() for line in BLOCKS[0].splitlines()] == ["make train", "make test"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one_that_exists(command: str) -> None:
    arguments = parser().parse_args(shlex.split(command)[1:])
    config = getattr(arguments, "config", None)
    assert config is None or config in presets() or config == "my.toml"


@pytest.mark.slow
def test_the_python_code_runs_as_a_world_of_one() -> None:
    blocks = [text for language, text in FENCED if language == "python"]
    assert len(blocks) == 5
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # a mesh needs a group
    for code in blocks:
        env = os.environ | (alone if "init_device_mesh" in code else {})
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stderr
        assert ("optimizer_states=" in done.stdout) == ("stats(" in code)


def test_every_file_of_the_map_exists() -> None:
    for path in re.findall(r"`(zeroshard/[\w/.]+)`", README):
        assert (ROOT / path).exists(), path


def test_every_file_that_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`([\w/]+/[\w.]*\.(?:py|h))`", text)
    assert len(paths) > 40
    for path in paths:
        folders = (ROOT, ROOT / "zeroshard", ROOT / "zeroshard/offload")
        assert any((folder / path).exists() for folder in folders), path
