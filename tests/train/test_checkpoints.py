"""What a resumed run may change, and what it may not."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.storage.forging import forge
from zeroshard.config.job import Job, TrainConfig
from zeroshard.train.checkpoints import AUTO, FOLDER, NEVER, Origin, ResumeError, RunCheckpoints, Start

JOB = Job(name="small", train=TrainConfig(batch=4, lr=0.01, weight_decay=0.1, save_every=1))
RANKS = 2


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with one checkpoint, as if two ranks had begun it."""
    folder = tmp_path_factory.mktemp("run")
    model = nn.Linear(2, 2)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()))
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    checkpoints = RunCheckpoints(Start.find(JOB, folder, AUTO, RANKS), folder, model, optimizer, scheduler)
    assert not checkpoints.after_step(1, {})
    checkpoints.finish()
    return folder


def changed(**settings: Any) -> Job:
    return replace(JOB, train=replace(JOB.train, **settings))


@pytest.mark.parametrize("setting", [{"lr": 0.02}, {"weight_decay": 0.0}, {"batch": 3}])
def test_a_setting_that_would_have_no_effect_is_refused(setting: dict[str, Any], out: Path) -> None:
    (name, value), *_ = setting.items()
    had = getattr(JOB.train, name)
    with pytest.raises(ResumeError, match=f"the run had train.{name} = {had}, this job has {value}.*--resume never"):
        Start.find(changed(**setting), out, AUTO, RANKS)
    assert getattr(Start.find(changed(**setting), out, NEVER, RANKS).job.train, name) == value


def test_other_ranks_take_their_share_of_the_batch_and_may_say_so(out: Path) -> None:
    for ranks, share in ((1, 8), (2, 4), (4, 2)):
        for batch in (JOB.train.batch, share):
            assert Start.find(changed(batch=batch, steps=500), out, AUTO, ranks).job.train.batch == share


def test_micro_batches_take_their_part_of_a_step_on_any_ranks() -> None:
    origin = Origin(ranks=2, batch=4, micro_batches=3)  # 24 sequences a step

    def share(ranks: int, **asked: int) -> tuple[int, int]:
        return origin.share(ranks, changed(**{"batch": 4, "micro_batches": 3, **asked}))

    assert [share(ranks) for ranks in (1, 2, 3, 8, 24)] == [(4, 6), (4, 3), (4, 2), (3, 1), (1, 1)]
    assert share(1, batch=12, micro_batches=2) == (12, 2), "a job may say its own"
    assert Origin(2, 4).share(1, changed()) == (8, 1)
    with pytest.raises(ResumeError, match=r"the run had train\.micro_batches = 3, this job has 5"):
        share(2, micro_batches=5)
    with pytest.raises(ResumeError, match="which 5 ranks cannot divide evenly"):
        share(5)
    assert Origin.read({"ranks": 2, "batch": 4}) == Origin(2, 4), "of a checkpoint of an earlier version"


@pytest.mark.parametrize("edit", [{"origin": {"x": 1}}, {"origin": {"ranks": 0, "batch": 4}}, {"step": "x"}])
def test_a_run_whose_beginning_was_edited_is_refused(edit: dict[str, Any], out: Path, tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path / "run")
    (folder,) = (tmp_path / "run" / FOLDER).iterdir()
    forge(folder, lambda v: v["parts"][0]["values"]["extra"].update(edit))
    with pytest.raises(ResumeError, match="it was edited, so resume from another"):
        Start.find(JOB, tmp_path / "run", AUTO, RANKS)
