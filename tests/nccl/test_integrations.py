"""Other libraries on the device: autocast, the gradient scaler and offload, beside the library's own DDP."""

from __future__ import annotations

from pathlib import Path

import pytest

import zeroshard
from tests.huggingface import under_torchrun
from tests.integrations.lightning_runs import ROWS, fitted, quietly
from tests.integrations.runs import Options, Run, logged, ran, rows, trainer
from tests.nccl.processes import device, on_nccl

ON_CPU = device().type == "cpu"
SETTINGS: dict[str, tuple[Options, Options]] = {
    # name: options of zeroshard, arguments of both trainers
    "stage 3": ({"stage": 3}, {}),
    "stage 3, fp16 with a scaler": ({"stage": 3}, {"fp16": True}),
    "stage 2, bf16, offload": ({"stage": 2, "offload": "cpu"}, {"bf16": True}),
}


@pytest.mark.parametrize("name", SETTINGS)
@on_nccl(2)
def test_the_trainer_gives_the_losses_of_ddp(name: str, tmp_path: Path) -> None:
    options, more = SETTINGS[name]
    with under_torchrun():
        plain, sharded = (ran(tmp_path, zeroshard, use_cpu=ON_CPU, **more) for zeroshard in (None, options))
    assert logged(sharded) == pytest.approx(logged(plain), rel=1e-2 if more else 1e-4)
    assert logged(sharded)[-1] < logged(sharded)[0]


@on_nccl(2)
def test_the_trainer_saves_goes_on_and_evaluates(tmp_path: Path) -> None:
    more: Options = {"use_cpu": ON_CPU, "fp16": True}
    with under_torchrun():
        whole = ran(tmp_path, {"stage": 3}, save_strategy="steps", save_steps=2, **more)
        rest = trainer(tmp_path, {"stage": 2}, **more)
        rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        losses = [each.evaluate(rows(8, seed=9))["eval_loss"] for each in (whole, rest)]
    assert logged(rest)[2:] == pytest.approx(logged(whole)[2:], rel=1e-2)
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
@on_nccl(2)
def test_accelerate_gives_the_losses_of_ddp(precision: str) -> None:
    runs = []
    for options in (None, {"stage": 3}):
        with under_torchrun():
            run = Run(options, cpu=ON_CPU, mixed_precision=precision, gradient_accumulation_steps=2)
            runs.append(run.train(8))
    plain, sharded = runs
    assert sharded.losses == pytest.approx(plain.losses, rel=1e-4 if precision == "no" else 1e-2)
    assert sharded.rates == plain.rates


LIGHTNING: dict[str, tuple[Options, Options, Options]] = {
    # name: options of zeroshard, arguments of the sharded trainer, arguments of both trainers
    "stage 3": ({"stage": 3}, {}, {"gradient_clip_val": 0.5}),
    "stage 3, fp16 with a scaler": ({"stage": 3}, {}, {"precision": "16-mixed", "gradient_clip_val": 0.5}),
    "stage 2, offload, bf16 with masters": ({"stage": 2, "offload": "cpu"}, {"precision": "bf16-true"}, {}),
}


@pytest.mark.parametrize("name", LIGHTNING)
@on_nccl(2)
def test_lightning_gives_the_losses_of_ddp_and_goes_on(name: str, tmp_path: Path) -> None:
    from zeroshard.integrations.lightning import ZeroshardStrategy

    options, own, more = LIGHTNING[name]
    with quietly():
        plain = fitted("ddp", 2, **more)
        sharded = fitted(ZeroshardStrategy(**options), 1, **own, **more)
        assert sharded.device.type == device().type
        assert zeroshard.stats(sharded).stage == options["stage"]
        sharded.trainer.save_checkpoint(tmp_path / "at.ckpt")
        resumed = fitted("zeroshard_stage_1", 2, tmp_path / "at.ckpt", **own, **more)
    assert len(resumed.losses) == ROWS // 4
    assert sharded.losses + resumed.losses == pytest.approx(
        plain.losses, rel=5e-2 if own else 1e-2 if "fp16" in name else 1e-4
    )
