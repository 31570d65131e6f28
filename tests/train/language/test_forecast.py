"""What the plan chooses for a fine-tuning: the largest micro-batch that fits, or the fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.language.chats import make_model
from zeroshard.config.finetune import LanguageModelConfig
from zeroshard.plan.room import Room
from zeroshard.train.language.forecast import Forecast, forecast
from zeroshard.train.language.model import LanguageModel
from zeroshard.train.task import parameter_groups

SEQUENCE = 128
OPTIONS = {"precision": "bf16", "stage": "auto", "offload": "auto", "clip_grad_norm": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), hidden_size=64, num_hidden_layers=4)


def ask(folder: Path, room: Room, *, ranks: int = 1, sequences: int = 16, most: int = 0, **options: Any) -> Forecast:
    import torch

    source = LanguageModel(LanguageModelConfig(huggingface=str(folder)))
    model = source.build(0)
    return forecast(
        model,
        torch.optim.AdamW(parameter_groups(model, 0.0)),
        {**OPTIONS, **options},
        room,
        lambda batch: source.example(batch, SEQUENCE),
        ranks=ranks,
        sequences=sequences,
        sequence=SEQUENCE,
        most=most,
    )


def test_with_room_for_all_a_step_is_one_micro_batch_and_with_less_room_it_is_several(folder: Path) -> None:
    wide = ask(folder, Room(1 << 40, 1 << 40))
    assert (wide.batch, wide.micro_batches, wide.stage, wide.offload, wide.fits) == (16, 1, 0, None, True)
    one = ask(folder, Room(1 << 40, 1 << 40), most=1)
    assert (one.batch, one.micro_batches) == (1, 16)
    assert one.row.budget.at_step.accumulators > 0
    room = (wide.row.budget.peak.total + one.row.budget.peak.total) // 2
    between = ask(folder, Room(room, 0))
    assert between.fits
    assert 1 <= between.batch < 16
    assert between.row.budget.peak.total <= room


def test_what_fits_nowhere_is_told_with_the_sizes(folder: Path) -> None:
    found = ask(folder, Room(1 << 16, 1 << 16))
    assert not found.fits
    assert "fits here" in found.told
    assert found.batch == 1


def test_on_a_known_machine_the_fastest_is_taken_and_its_seconds_are_told(folder: Path) -> None:
    found = ask(folder, Room(139 << 30, 120 << 30, 1, "NVIDIA H200"))
    assert "s a step" in found.told
    assert found.row.time is not None


def test_a_stage_that_is_said_stays(folder: Path) -> None:
    found = ask(folder, Room(1 << 40, 1 << 40), ranks=4, stage=3, offload="cpu")
    assert found.stage == 3
    assert found.offload is not None
    assert "stage 3, offload cpu, as asked" in found.told


def test_an_update_in_the_first_backward_takes_a_step_at_once(folder: Path) -> None:
    early = {"offload": {"update_in_backward": True}, "clip_grad_norm": None, "stage": 2}
    assert ask(folder, Room(1 << 40, 1 << 40), **early).micro_batches == 1
    with pytest.raises(ValueError, match=r"train\.batch: 4 sequences are a part of the 16"):
        ask(folder, Room(1 << 40, 1 << 40), most=4, **early)
