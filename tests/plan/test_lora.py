"""LoRA in the plan: what PEFT adds is trained, and nothing else has gradients or optimizer states."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.test_main import exit_code
from tests.plan.architectures import configuration
from tests.plan.gpts import gpt
from zeroshard.plan.memory.budget import budget
from zeroshard.plan.model.lora import with_adapters
from zeroshard.plan.model.model import Model
from zeroshard.plan.model.source import find_model
from zeroshard.plan.setup import ModelError, Setup
from zeroshard.plan.volume import volume

SETUP = Setup(stage=0, sequence=32, batch=2)


def llama(folder: Path, **changes: Any) -> Model:
    (folder / "config.json").write_text(json.dumps(configuration("llama", **changes)))
    return find_model(str(folder)).model


def trained(model: Model, setup: Setup = SETUP) -> int:
    return sum(flat.parameters for unit in model.trace(setup).units for flat in unit.flats if flat.trained)


@pytest.mark.parametrize("rank", [1, 8])
def test_adapters_are_those_of_peft(rank: int, tmp_path: Path) -> None:
    import peft
    import transformers

    model = with_adapters(llama(tmp_path), rank)
    with torch.device("meta"):
        base = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**configuration("llama"))
        )
        adapted = peft.get_peft_model(base, peft.LoraConfig(r=rank, target_modules="all-linear"))
    sizes = {flag: sum(p.numel() for p in adapted.parameters() if p.requires_grad is flag) for flag in (True, False)}
    assert trained(model) == sizes[True]
    assert model.parameters == sizes[True] + sizes[False]
    assert model.name.endswith(f", LoRA {rank}")


@pytest.mark.parametrize("layers", [4, 14])
def test_a_rank_adds_its_columns_and_rows_to_every_matrix_of_every_block(layers: int, tmp_path: Path) -> None:
    model = llama(tmp_path, num_hidden_layers=layers)
    hidden, heads, keys, mlp = 128, 4 * 48, 2 * 48, 384
    one = (hidden + heads) * 2 + (hidden + keys) * 2 + (hidden + mlp) * 3
    assert trained(with_adapters(model, 4)) == 4 * layers * one
    assert trained(model) == model.parameters, "the model itself stays as it is"


def test_a_gpt_of_ours_has_adapters_in_all_of_its_layers() -> None:
    few, many = (trained(with_adapters(gpt(layers, 64, 2), 4)) for layers in (20, 30))
    assert many - few == 10 * 4 * ((64 + 192) + (64 + 64) + 2 * (64 + 256))


@pytest.mark.parametrize("stage", range(4))
def test_only_adapters_have_gradients_and_states(stage: int, tmp_path: Path) -> None:
    model = with_adapters(llama(tmp_path), 8)
    setup = Setup(stage=stage, world=4, sequence=32, batch=2)
    needs, adapters = budget(model, setup).at_step, trained(model)
    full = budget(llama(tmp_path), setup).at_step
    assert needs.gradients == pytest.approx(2 * adapters / (4 if stage >= 2 else 1), rel=0.05)
    assert needs.optimizer_states == pytest.approx(12 * adapters / (4 if stage >= 1 else 1), rel=0.05)
    assert needs.parameters == pytest.approx(full.parameters + 2 * adapters / (4 if stage == 3 else 1), rel=0.02)
    moved = volume(model, setup)
    assert moved.reduce_scatter + moved.all_reduce / 2 == pytest.approx(adapters, rel=0.1)


def test_blocks_of_a_frozen_model_are_recomputed_by_shard(tmp_path: Path) -> None:
    for model in (llama(tmp_path), gpt(12, 64, 2)):
        adapted = with_adapters(model, 4)
        plain, recomputed = (adapted.trace(replace(SETUP, checkpointing=on)) for on in (False, True))
        assert recomputed.recomputes
        assert not plain.recomputes
        assert recomputed.activations.saved < plain.activations.saved
        assert recomputed.backward_ratio > plain.backward_ratio + 0.5


def test_frozen_matrices_need_no_gradient_so_backward_is_shorter(tmp_path: Path) -> None:
    model, setup = llama(tmp_path), Setup(stage=0, sequence=32, batch=2, checkpointing=False)
    assert model.trace(setup).backward_ratio == pytest.approx(2, rel=0.01)
    assert with_adapters(model, 1).trace(setup).backward_ratio < 1.4


def test_a_module_of_the_user_gets_adapters_too() -> None:
    model = find_model("tests.plan.factory:samples").model
    assert trained(with_adapters(model, 4)) == 3 * 4 * 2 * 1024 or trained(with_adapters(model, 4)) == 4 * 4 * 2 * 1024


@pytest.mark.parametrize("degree", [2])
def test_adapters_of_a_divided_model_are_refused(degree: int) -> None:
    with pytest.raises(ModelError, match="--lora 4: adapters are not planned together with --model-parallel"):
        with_adapters(gpt(3, 64, 2), 4).trace(Setup(stage=0, sequence=32, model_parallel=degree))


def test_without_peft_an_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r'--lora 4: LoRA is planned with the package peft: pip install "peft'):
        with_adapters(gpt(3, 64, 2), 4).trace(SETUP)


def test_the_command_plans_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama(tmp_path)
    hardware = ("--gpus", "8", "--machine", "h100")
    rows = []
    for more in ((), ("--lora", "16")):
        assert exit_code("plan", str(tmp_path), *hardware, *more, "--json") == 0
        rows.append(json.loads(capsys.readouterr().out))
    plain, adapted = (told["rows"][0] for told in rows)
    assert adapted["at_step"]["optimizer_states"] < 0.5 * plain["at_step"]["optimizer_states"]
    assert rows[1]["model"]["name"].endswith("LoRA 16")
    assert "train.py" in rows[1]["recommended"]["command"], "`zeroshard train` has no adapters"
    assert exit_code("plan", str(tmp_path), *hardware, "--lora", "0") == 2
    assert "--lora 0: must be above 0" in capsys.readouterr().err


def test_a_preset_with_adapters_is_a_loop_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("plan", "zero-1.5b", "--gpus", "8", "--machine", "h100", "--lora", "8", "--json") == 0
    assert json.loads(capsys.readouterr().out)["recommended"]["command"].endswith("train.py")
