"""The recording of a large batch from two small ones, and a model with more blocks than were built."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.matrix import quick
from tests.plan.architectures import configuration
from tests.plan.gpts import gpt
from tests.plan.traces import trace_every_batch
from zeroshard.config.job import ModelConfig
from zeroshard.config.options import Activations
from zeroshard.plan.model.blocks import Sample
from zeroshard.plan.model.gpt import from_config
from zeroshard.plan.model.model import LARGEST_RECORDED, Model
from zeroshard.plan.model.recording import Outline, Recording, at_batch
from zeroshard.plan.model.source import find_model
from zeroshard.plan.model.tracer import Built, record
from zeroshard.plan.model.units import FlatShape, UnitShape
from zeroshard.plan.setup import Setup

SETUP = Setup(stage=0, sequence=32)


def recorded(model: Model, batch: int, activations: Activations | None = None) -> Recording:
    setup = replace(SETUP, batch=batch, checkpointing=False)
    return record(lambda: model.build(setup), "bf16", 1 << 30, activations=activations)[0]


@pytest.mark.parametrize("activations", [None, Activations(), Activations(offload=True)])
def test_two_recordings_give_the_recording_of_any_batch(activations: Activations | None) -> None:
    model = gpt(12, 64, 2)
    two, three, nine = (recorded(model, batch, activations) for batch in (2, 3, 9))
    assert two.like(three)
    assert at_batch(two, three, 7) == nine
    assert at_batch(two, three, 1) == three
    assert at_batch(two, three, 0) == two


def test_recordings_that_saw_other_moments_are_not_alike() -> None:
    model = gpt(12, 64, 2)
    assert not recorded(model, 2).like(recorded(gpt(2, 64, 2), 2))
    assert not recorded(model, 2).like(recorded(model, 2, Activations()))


def of_file(kind: str) -> Callable[[Path], Model]:
    def model(folder: Path) -> Model:
        (folder / "config.json").write_text(json.dumps(configuration(kind)))
        return find_model(str(folder)).model

    return model


MODELS: dict[str, Callable[[Path], Model]] = {
    "gpt": lambda _: gpt(12, 64, 2),
    "gpt of two ranks": lambda _: gpt(12, 64, 2),
    "samples": lambda _: find_model("tests.plan.factory:samples").model,
    "sequences": lambda _: find_model("tests.plan.factory:sequences").model,
    **{kind: of_file(kind) for kind in ("gpt2", "llama", "gemma3_text", "mixtral", "t5", "vit", "bert")},
}


@pytest.mark.parametrize("name", quick(MODELS, "gpt", "gpt of two ranks", "samples", "llama", "gemma3_text", "vit"))
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trace_of_a_large_batch_is_as_if_that_batch_was_traced(
    name: str, checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    degree = 2 if name == "gpt of two ranks" else 1
    setup = replace(SETUP, batch=7, checkpointing=checkpointing, model_parallel=degree)
    short = MODELS[name](tmp_path).trace(setup)
    trace_every_batch(monkeypatch)
    whole = MODELS[name](tmp_path).trace(setup)
    assert short.activations == whole.activations
    assert short.forward_flops == pytest.approx(whole.forward_flops)
    assert short.forward_written == pytest.approx(whole.forward_written)
    assert short.backward_ratio == pytest.approx(whole.backward_ratio)
    assert (short.logits, short.stream, short.checkpoints) == (whole.logits, whole.stream, whole.checkpoints)


def test_a_model_that_does_other_things_in_large_batches_is_traced_in_its_own() -> None:
    class Careful(nn.Linear):
        """Keeps one more tensor if three samples or more come."""

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(min(len(x), 5)):
                x = super().forward(x).relu()
            return x

    def build(setup: Setup) -> Built:
        with torch.device("meta"):
            return Built(Careful(8, 8), (torch.empty(setup.batch, 8),))

    model = Model("careful", build)
    by_batch = {batch: sum(model.trace(replace(SETUP, batch=batch)).forward_flops) for batch in (2, 3, 4, 8)}
    assert by_batch == {batch: min(batch, 5) * 2 * batch * 8 * 8 for batch in by_batch}


def test_large_batches_need_no_traces_of_their_own() -> None:
    built: list[int] = []
    model = gpt(12, 64, 2)

    def build(setup: Setup) -> Built:
        built.append(setup.batch)
        return model.build(setup)

    counted = Model("counted", build)
    for batch in (1, 4, 64, 1000):
        for stage in range(4):
            counted.trace(replace(SETUP, batch=batch, stage=stage, world=stage + 1))
    assert sorted(built) == [1, LARGEST_RECORDED - 1, LARGEST_RECORDED]


# -- more blocks ------------------------------------------------------------------------------------------------------


def unit(block: int, size: int) -> UnitShape:
    return UnitShape(block, (FlatShape.of([size]),))


def test_more_blocks_stand_before_the_last_one() -> None:
    units = (unit(0, 9), unit(1, 8), unit(2, 7), unit(2, 6), unit(3, 5))
    outline = Outline(units, Sample((0, 1, 2), (0, 1, 2)), buffers=4, blocks=("0", "1", "2"))
    more = outline.with_more(2)
    assert more.units == (
        *units[:4],
        *(unit(3, 7), unit(3, 6)),
        *(unit(4, 7), unit(4, 6)),
        unit(5, 5),
    )
    assert more.sample == Sample((0, 1, 2), (0, 1, 1, 1, 2))
    assert more.buffers == 4
    assert outline.with_more(0) is outline


@pytest.mark.parametrize("layers", [2, 8, 9, 10, 11, 40])
@pytest.mark.parametrize("tied", [False, True])
def test_a_gpt_of_any_depth_has_its_parameters_and_blocks(layers: int, tied: bool) -> None:
    config = ModelConfig(layers=layers, hidden=64, heads=2, sequence=32, vocabulary=300, tied=tied)
    model = from_config(config)
    assert model.parameters == config.parameters
    seen = model.trace(replace(SETUP, checkpointing=False))
    assert [unit.block for unit in seen.units] == list(range(layers + 1))
    assert len(seen.kinds) == len(seen.forward_flops) == len(seen.activations.backward) == layers + 1


@pytest.mark.parametrize("layers", [0, 1])
def test_a_gpt_with_at_most_one_block_is_one_unit(layers: int) -> None:
    config = ModelConfig(layers=layers, hidden=64, heads=2, sequence=32, vocabulary=300)
    seen = from_config(config).trace(replace(SETUP, checkpointing=False))
    assert seen.parameters == config.parameters
    assert len(seen.units) == 1
    assert seen.work is not None


def test_gpts_of_other_depths_have_traces_of_their_own() -> None:
    few, many = (gpt(layers, 64, 2).trace(SETUP) for layers in (20, 30))
    assert len(few.units) == 21
    assert len(many.units) == 31
    assert many.activations.saved - few.activations.saved == 10 * 32 * 64 * 2
