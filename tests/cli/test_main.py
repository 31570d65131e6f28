"""The command line: help, and bad input with exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest

from zeroshard.cli.main import main


def exit_code(*argv: str) -> int:
    """What the process would exit with; argparse exits by itself."""
    try:
        return main(argv)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize("command", [[], ["train"], ["doctor"]])
def test_help_explains_every_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*command, "--help") == 0
    shown = capsys.readouterr().out
    assert "usage: zeroshard" in shown
    if command == ["train"]:
        for flag in ("--stage", "--ranks", "--steps", "--lr", "--device", "--precision", "--set", "--out", "--nnodes"):
            assert flag in shown
        assert "--master-addr node0" in shown


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "COMMAND"),
        (["trian"], "trian"),
        (["train", "--stage", "4"], "--stage"),
        (["train", "--precision", "fp8"], "fp8"),
        (["train", "--no-such-flag"], "--no-such-flag"),
        (["train", "no-such-preset"], "no such preset"),
        (["train", "nowhere.toml"], "no such file: nowhere.toml"),
        (["train", "tiny", "--ranks", "0"], "--ranks must be at least 1"),
        (["train", "tiny", "--steps", "0"], "train.steps: must be at least 1"),
        (["train", "tiny", "--lr", "0"], "train.lr: must be"),
        (["train", "tiny", "--set", "train.lr"], "table.key=value"),
        (["train", "tiny", "--set", "train.lrr=1"], "did you mean 'lr'?"),
        (["train", "tiny", "--set", "shard.keep=[]", "--stage", "2"], "keep"),
        (["train", "tiny", "--nnodes", "2"], "--master-addr"),
        (["train", "tiny", "--nnodes", "0"], "--nnodes"),
        (["train", "tiny", "--nnodes", "2", "--node-rank", "2"], "--node-rank must be from 0 to 1"),
    ],
)
def test_bad_input_exits_with_two_and_names_it(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*argv) == 2
    assert told in capsys.readouterr().err


def test_every_error_of_a_configuration_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[model]\nlayer = 2\n[train]\nlr = 'high'\n[shard]\nstage = 7\n")
    assert exit_code("train", str(file)) == 2
    told = capsys.readouterr().err
    for text in ("model.layer: unknown key (did you mean 'layers'?)", "train.lr: must be a number", "shard.stage"):
        assert text in told


def test_the_presets_are_listed_with_their_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("train", "--list") == 0
    shown = capsys.readouterr().out
    assert "stdlib-10m" in shown
    assert "170.8B" in shown


@pytest.mark.slow
def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "zeroshard", "--help"], capture_output=True, text=True, check=True)
    assert "train" in done.stdout


def test_output_that_nobody_reads_any_more_ends_the_command_without_a_traceback() -> None:
    command = f"{sys.executable} -m zeroshard plan zero-1.5b --machine h200 --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 141
    assert done.stderr == ""
