"""Runs that are killed, stopped and resumed, as `zeroshard train` has them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.ranks import Pool
from tests.storage.killing import ENVIRONMENT, STEPS, kill_often, weights_of
from zeroshard.cli.main import main
from zeroshard.config.job import load_job
from zeroshard.train import loop
from zeroshard.train.checkpoints import ResumeError, Start

KILLS = 5
COMMAND = [sys.executable, "-m", "zeroshard", "train", "tiny", "--device", "cpu", "--set", "train.sample=0"]


def on_these_ranks(out: str, settings: dict[str, object], resume: str) -> str:
    """What `zeroshard train` does on each rank; returns what it printed."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as told:
        patch.setenv("RANK", str(dist.get_rank()))
        patch.setenv("WORLD_SIZE", str(dist.get_world_size()))
        patch.setattr(dist, "destroy_process_group", lambda: None)  # it is the pool's
        loop.train(load_job("tiny", {"train.device": "cpu", "train.sample": 0, **settings}), Path(out), resume=resume)
    return told.getvalue()


def train(out: Path, ranks: int, settings: dict[str, object], resume: str = "never") -> str:
    """A run on processes that are there already: to start others takes longer than twelve steps."""
    arguments = {"out": str(out), "settings": settings, "resume": resume}
    told: str = Pool.shared().run(on_these_ranks, ranks, arguments)[0]
    return told


@pytest.mark.slow
def test_whatever_rank_is_killed_and_when_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    train(tmp_path / "whole", 2, {"train.steps": STEPS, "train.evaluate_every": 1_000_000})
    told = kill_often(tmp_path / "killed", KILLS, 1)
    begun = [line for line in told.splitlines() if line.startswith(("resumed after step", "no checkpoint"))]
    assert len(begun) == KILLS + 1, told
    assert any(line.startswith("resumed") for line in begun), told
    assert weights_of(tmp_path / "killed") == weights_of(tmp_path / "whole")


class Run(NamedTuple):
    out: Path
    told: str


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of twelve steps on two ranks, with checkpoints."""
    out = tmp_path_factory.mktemp("whole")
    told = train(out, 2, {"train.save_every": 4, "train.keep": 2})
    assert sorted(entry.name for entry in (out / "checkpoints").iterdir()) == ["step-00000008", "step-00000012"]
    return Run(out, told)


def held_out_loss(told: str) -> float:
    measured = re.search(r"held-out loss\s+│\s+[\d.]+ → ([\d.]+)", told)
    assert measured is not None, told
    return float(measured[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "settings"), [(1, {"shard.stage": 0}), (4, {"shard.stage": 2, "shard.offload": "cpu"})]
)
def test_a_run_goes_on_on_fewer_and_on_more_ranks_by_value(
    ranks: int, settings: dict[str, object], whole: Run, tmp_path: Path
) -> None:
    told = train(tmp_path, ranks, settings, str(whole.out / "checkpoints" / "step-00000008"))
    assert "resumed after step 8/12" in told
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(whole.out / "model.safetensors")
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)
    assert held_out_loss(told) == pytest.approx(held_out_loss(whole.told), abs=0.002)


@pytest.mark.slow
def test_sigterm_saves_and_ends_cleanly_and_the_run_goes_on(tmp_path: Path) -> None:
    endless = ["--set", "train.evaluate_every=1000000", "--out", str(tmp_path), "--ranks", "2"]
    process = subprocess.Popen(
        [*COMMAND, *endless, "--steps", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 4/"):
            break
    process.send_signal(signal.SIGTERM)
    told, complained = process.communicate(timeout=60)
    assert process.returncode == 0, told + complained
    stopped = re.search(r"stopped after step (\d+) \(SIGTERM\); saved (\S+)", told)
    assert stopped is not None, told
    assert (Path(stopped[2]) / "COMPLETE").exists()
    assert complained == ""
    steps = int(stopped[1]) + 2
    settings = {"train.evaluate_every": 1_000_000, "train.steps": steps}
    assert f"resumed after step {stopped[1]}/{steps}" in train(tmp_path, 2, settings, "auto")


@pytest.mark.slow
def test_a_run_that_meets_nan_stops_with_the_last_good_states_saved(tmp_path: Path) -> None:
    bad = ["--set", "shard.on_nonfinite=stop", "--set", "train.lr=1e30", "--out", str(tmp_path), "--ranks", "1"]
    done = subprocess.run([*COMMAND, *bad], capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT)
    assert done.returncode == 1
    assert re.search(r"stopped after step 2 \(step 2: the output of unit '\S+' is not finite on rank 0\)", done.stdout)
    assert (tmp_path / "checkpoints" / "step-00000002" / "COMPLETE").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--resume", "nowhere"], "--resume nowhere: no such folder"),
        (["--restarts", "3"], "--restarts without --resume auto and --save-every"),
        (["--restarts", "-1"], "--restarts must be at least 0"),
        (["--save-every", "-1"], "train.save_every: must be at least 0, is -1"),
        (["--keep", "0"], "train.keep: must be at least 1, is 0"),
        (["--save-every", "4", "--out", "WHOLE"], "holds checkpoints of an earlier run, which this one would replace"),
    ],
)
def test_bad_input_is_told_before_anything_starts(
    arguments: list[str], told: str, whole: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(whole.out) if argument == "WHOLE" else argument for argument in arguments]
    assert main(["train", "tiny", "--device", "cpu", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_a_checkpoint_of_another_job_is_refused(whole: Run) -> None:
    for setting, value, told in (
        ("model.layers", 2, "the run had model.layers = 3, this job has 2.*--out"),
        ("train.seed", 7, "the run had seed = 0"),
    ):
        with pytest.raises(ResumeError, match=told):
            Start.find(load_job("tiny", {setting: value}), whole.out, "auto", 1)
    with pytest.raises(ResumeError, match="2 × 4 sequences a step, which 3 ranks cannot divide"):
        Start.find(load_job("tiny"), whole.out, "auto", 3)
    assert Start.find(load_job("tiny"), whole.out, "never", 3).path is None
