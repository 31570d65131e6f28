"""One rank's part of a module: matrices are cut as torch cuts them, and unknown ways to divide are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.matrix import matrix
from tests.plan.architectures import configuration
from tests.plan.dry import dry_gpt
from zeroshard.config.job import ModelConfig
from zeroshard.plan.model.divide import check_heads, divide
from zeroshard.plan.model.gpt import from_config
from zeroshard.plan.model.source import find_model
from zeroshard.plan.setup import ModelError, Setup


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 20), nn.Linear(20, 8)
        self.norm = nn.LayerNorm(8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(2))


STYLES = {"embed": "rowwise", "layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise"}


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_columns_divide_results_and_rows_divide_what_comes_in() -> None:
    model = Model()
    divided = divide(model, STYLES, 4)
    found = shapes(model)
    assert found["layers.1.up.weight"] == (5, 8)
    assert found["layers.1.up.bias"] == (5,)
    assert found["layers.1.down.weight"] == (8, 5)
    assert found["layers.1.down.bias"] == (8,), "every rank has the whole bias of a sum"
    assert found["layers.1.norm.weight"] == (8,)
    assert found["embed.weight"] == (3, 8), "the first rank has the largest part"
    assert found["head.weight"] == (3, 8)
    whole = {"layers.0.down.bias", "layers.1.down.bias"}
    assert {name for name, parameter in model.named_parameters() if id(parameter) in divided} == {
        name for name in found if "norm" not in name and name not in whole
    }


def test_a_parameter_that_is_frozen_stays_frozen() -> None:
    model = Model()
    model.layers[0].up.weight.requires_grad_(False)
    divide(model, STYLES, 2)
    assert not model.layers[0].up.weight.requires_grad
    assert model.layers[0].up.bias.requires_grad


@pytest.mark.parametrize("style", ["replicated_with_grad_allreduce", "replicate"])
def test_styles_that_leave_a_rank_with_everything_divide_nothing(style: str) -> None:
    model, before = Model(), shapes(Model())
    assert not divide(model, {"layers.*.up": style}, 2)
    assert shapes(model) == before


def test_a_star_is_one_part_of_a_name() -> None:
    model = Model()
    assert not divide(model, {"*.up": "colwise", "up": "colwise"}, 2)
    assert divide(model, {"*.*.up": "colwise"}, 2)


@pytest.mark.parametrize(
    ("styles", "told"),
    [
        ({"layers.*.up": "grouped_gemm"}, "how layers.0.up is divided (grouped_gemm) is not known"),
        ({"layers.*.norm": "colwise"}, "how layers.0.norm is divided (colwise) is not known"),
    ],
)
def test_ways_that_are_not_known_are_refused(styles: dict[str, str], told: str) -> None:
    with pytest.raises(ModelError) as raised:
        divide(Model(), styles, 2)
    assert told in str(raised.value)
    assert "--model-parallel 2" in str(raised.value)


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    check_heads(4, 8, 4)
    check_heads(4, 8)
    with pytest.raises(ModelError, match="--model-parallel 4 does not divide the 25 heads"):
        check_heads(4, 8, 25)


@matrix(degree=(1, 2, 8), tied=(True, False))
def test_a_rank_of_a_gpt_has_as_many_parameters_as_in_a_run(degree: int, tied: bool) -> None:
    """The vocabulary of 300 is not a multiple of 8, and the first rank has the largest part."""
    config = ModelConfig(layers=3, hidden=128, heads=8, sequence=16, vocabulary=300, tied=tied)
    part = from_config(config).trace(Setup(stage=0, sequence=16, model_parallel=degree, checkpointing=False))
    assert part.parameters == dry_gpt(config, degree, degree=degree, stage=0).parameters
    assert from_config(config).parameters == config.parameters


def of_file(folder: Path, kind: str, **changes: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(configuration(kind, **changes)))
    return find_model(str(folder)).model


def test_a_llama_is_divided_as_transformers_says(tmp_path: Path) -> None:
    model = of_file(tmp_path, "llama")
    one, two = (
        model.trace(Setup(stage=0, sequence=32, batch=2, model_parallel=degree, checkpointing=False))
        for degree in (1, 2)
    )
    for whole, part in zip(one.units[1:], two.units[1:], strict=True):
        norms = 2 * 128
        assert (
            sum(flat.parameters for flat in part.flats) == (sum(f.parameters for f in whole.flats) - norms) / 2 + norms
        )
    assert sum(two.forward_flops[1:]) == pytest.approx(sum(one.forward_flops[1:]) / 2)
    assert two.activations.saved < one.activations.saved
    assert two.stream == one.stream


def test_ranks_share_the_heads_of_keys_too(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not divide the 2 heads"):
        of_file(tmp_path, "llama").trace(Setup(stage=0, sequence=32, model_parallel=4))


def test_a_model_that_transformers_does_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"--model-parallel 2: transformers has no plan to divide the blocks of Bloom"):
        of_file(tmp_path, "bloom").trace(Setup(stage=0, sequence=32, model_parallel=2))


def test_checkpoints_are_divided_up_to_one_element() -> None:
    from zeroshard import Activations

    config = ModelConfig(layers=3, hidden=96, heads=3, sequence=7, vocabulary=300)
    setup = Setup(stage=0, sequence=7, model_parallel=3, activations=Activations(partition=True))
    seen = from_config(config).trace(setup)
    part = math.ceil(7 * 96 / 3)
    assert seen.checkpoints == pytest.approx(3 * 2 * part, abs=3 * 2 * 64)
    assert seen.gathered_checkpoints == pytest.approx(3 * 7 * 96, abs=3 * 3 * 64)


def test_the_parts_are_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Model()
    divide(model, STYLES, 2)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
