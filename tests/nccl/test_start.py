"""The first minutes of a job on several NCCL ranks: it starts, trains, and ends when it is told to."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import zeroshard
from tests.nccl.processes import device, on_nccl, outputs, start
from tests.nccl.runs import adamw, small

TRAIN = [sys.executable, "-m", "zeroshard", "train", "tiny", "--device", device().type]
WORLD = 2
OPTIONS = {
    "stage 1": ["--stage", "1"],
    "stage 3": ["--stage", "3"],
    "offload": ["--stage", "2", "--offload", "cpu"],
}

Jobs = dict[str, tuple[list[subprocess.Popen[str]], Path]]
"""The ranks of each job, and the folder that they write to."""


@on_nccl(WORLD)
def test_ranks_that_were_given_different_things_say_which() -> None:
    model = small()
    with pytest.raises(zeroshard.DisagreementError, match=r"rank 0 has stage=1, rank 1 has stage=2"):
        zeroshard.shard(model, adamw(model.parameters()), stage=1 + dist.get_rank())


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """All at once: most of the time they import, or wait for each other."""
    folders = {name: tmp_path_factory.mktemp(name) for name in OPTIONS}
    started = {name: start([*TRAIN, *OPTIONS[name], "--out", str(folders[name])], WORLD) for name in OPTIONS}
    yield {name: (started[name], folders[name]) for name in OPTIONS}
    for ranks in started.values():
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("name", OPTIONS)
def test_the_ready_made_job_trains(name: str, jobs: Jobs) -> None:
    ranks, folder = jobs[name]
    printed, *_ = outputs(ranks)
    losses = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+) (?:before|after)", printed)]
    assert losses[-1] < losses[0] - 0.5
    assert (folder / "model.safetensors").exists()


def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(tmp_path: Path) -> None:
    endless = ["--set", "train.steps=1000000", "--set", "train.evaluate_every=1000000", "--save-every", "10"]
    ranks = start([*TRAIN, *endless, "--out", str(tmp_path)], WORLD)
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob("checkpoints/step-*/COMPLETE")) and time.monotonic() < deadline:
        time.sleep(0.2)
    ranks[1].send_signal(signal.SIGTERM)
    assert "stopped after step" in outputs(ranks)[0]
