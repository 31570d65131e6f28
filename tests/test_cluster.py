"""The recipe for Slurm, with programs in Slurm's place: two nodes on this machine, a signal, and a requeue."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples/cluster/train.sbatch"
OWN = [str(ROOT / "examples/cluster/train.py"), "--batch", "2", "--sequence", "32", "--report-every", "1"]
READY_MADE = [
    "-m",
    "zeroshard",
    "train",
    "tiny",
    "--device",
    "cpu",
    "--resume",
    "auto",
    "--set",
    "train.report_every=1",
]
JOB = "4711"
PATIENCE = 150

PROGRAMS = {
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    # Starts the command on two nodes, and notes the processes for scancel.
    "srun": """
        [ "$1" = --kill-on-bad-exit=0 ] || exit 90
        shift
        for node in 0 1; do
            SLURM_NODEID=$node SLURMD_NODENAME=localhost "$@" &
            echo $! >>"$FAKE/step"
        done
        code=0
        for process in $(cat "$FAKE/step"); do
            wait "$process" || code=$?
        done
        exit "$code" """,
    "scontrol": """
        case "$1 $2" in
        "show hostnames") [ "$3" = "node[0-1]" ] && printf 'localhost\\nother\\n' ;;
        "requeue 4711") touch "$FAKE/requeued" ;;
        *) exit 90 ;;
        esac""",
    "scancel": """
        [ "$*" = "--signal=TERM 4711" ] || exit 90
        xargs kill -TERM <"$FAKE/step" """,
}


class Slurm:
    """A cluster whose nodes are all this machine."""

    def __init__(self, folder: Path, **programs: str) -> None:
        self.folder, self.starts = folder, 0
        for name, text in (PROGRAMS | programs).items():
            file = folder / name
            file.write_text(f"#!/bin/bash\n{text}\n")
            file.chmod(0o755)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        for name in ("step", "requeued"):
            (self.folder / name).unlink(missing_ok=True)
        job = {
            "SLURM_JOB_ID": JOB,
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_RESTART_COUNT": str(self.starts),
            "RANKS": "1",
            "INTERFACE": "lo",
        }
        self.starts += 1
        here = {"FAKE": str(self.folder), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        path = f"{self.folder}:{os.environ['PATH']}"
        return subprocess.Popen(
            ["bash", str(SCRIPT), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **job, **here, "PATH": path},
        )

    @property
    def requeued(self) -> bool:
        return (self.folder / "requeued").exists()


def until(job: subprocess.Popen[str], words: str) -> str:
    """Reads what a job prints, until it prints this."""
    assert job.stdout is not None
    said, deadline = "", time.monotonic() + PATIENCE
    for line in job.stdout:
        said += line
        if re.search(words, line):
            return said
        assert time.monotonic() < deadline, said
    raise AssertionError(said)


def test_the_script_is_right_for_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(SCRIPT)], check=True)
    lines = SCRIPT.read_text().splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[:last])  # Slurm reads no option after the first command
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage" in done.stderr


def test_a_run_that_fails_is_not_requeued(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, torchrun="exit 3")
    job = slurm.start("train.py")
    said, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 3, said
    assert not slurm.requeued


def stopped_before_its_limit(slurm: Slurm, job: subprocess.Popen[str]) -> int:
    """Tells a job that its time limit is near. Returns the step after which the run stopped."""
    job.send_signal(signal.SIGUSR1)
    said, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, said
    assert slurm.requeued
    (step,) = re.findall(r"stopped after step (\d+)", said)
    return int(step)


@pytest.mark.slow
def test_a_script_of_ones_own_saves_before_the_time_limit_and_goes_on(tmp_path: Path) -> None:
    slurm, out = Slurm(tmp_path), ["--out", str(tmp_path / "run")]
    job = slurm.start(*OWN, "--steps", "1000000", *out)
    until(job, "step 2:")
    step = stopped_before_its_limit(slurm, job)
    job = slurm.start(*OWN, "--steps", str(step + 2), *out)
    said, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, said
    assert not slurm.requeued
    assert f"goes on after step {step}\nstep {step + 1}: loss" in said
    assert (tmp_path / "run/weights.pt").exists()


@pytest.mark.slow
def test_zeroshard_train_saves_before_the_time_limit_and_goes_on(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path)
    arguments = [*READY_MADE, "--out", str(tmp_path / "run")]
    job = slurm.start(*arguments)
    until(job, "step 2/")
    step = stopped_before_its_limit(slurm, job)
    job = slurm.start(*arguments)
    until(job, f"resumed after step {step}/")
    until(job, f"step {step + 1}/")
    stopped_before_its_limit(slurm, job)
