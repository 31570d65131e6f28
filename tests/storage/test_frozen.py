"""Checkpoints without frozen parameters: the same ones must be there already, whatever the stage and world."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.huggingface import llama
from tests.models import loss_of, net
from tests.ranks import Pool, on_ranks
from zeroshard.runtime import runtime_of
from zeroshard.storage.export import export
from zeroshard.storage.format import CheckpointError
from zeroshard.storage.frozen import _sum as frozen_sum
from zeroshard.storage.frozen import difference, sums_of, table_of


def made(stage: int, *, trained: str = "bias", **options: Any) -> Any:
    """A model whose parameters are frozen, but for those whose names end so. Values are the same each time."""
    model: nn.Module = net(depth=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(trained))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return zeroshard.shard(model, optimizer, stage=stage, **options)


def step(model: Any, optimizer: Any, number: int) -> float:
    loss = loss_of(model, number)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def saved(folder: str, stage: int, **options: Any) -> dict[str, Any]:
    """A run that saves after a step. Returns the weights."""
    model, optimizer = made(stage, **options)
    step(model, optimizer, 0)
    zeroshard.save(folder, model, optimizer, extra={"step": 1}, frozen=False)
    return zeroshard.full_state_dict(model)


def loaded(folder: str, stage: int, **options: Any) -> dict[str, Any]:
    model, optimizer = made(stage, **options)
    assert zeroshard.load(folder, model, optimizer) == {"step": 1}
    found = zeroshard.full_state_dict(model)
    step(model, optimizer, 1)
    return found


@pytest.mark.parametrize(("before", "after"), [((2, 3), (1, 0)), ((1, 1), (2, 3)), ((2, 2), (2, 1))])
def test_a_run_goes_on_in_another_stage_and_world(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    def run(body: Any, world: int, stage: int) -> Any:
        return Pool.shared().run(body, world, {"folder": str(tmp_path / "step-1"), "stage": stage})[0]

    expected, found = run(saved, *before), run(loaded, *after)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    index = json.loads((tmp_path / "step-1" / "index.json").read_text())
    written = {entry["name"] for part in index["parts"] for entry in part["entries"]}
    assert {name for name in written if name in expected} == {name for name in expected if name.endswith("bias")}


@pytest.mark.parametrize("offload", ["cpu", {"parameters": "cpu"}])
@on_ranks(2)
def test_a_run_goes_on_where_parameters_rest_in_16_bits_and_on_the_host(offload: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": "bf16", "offload": offload}
    expected = saved(str(tmp_path / "step-1"), 3, **options)
    found = loaded(str(tmp_path / "step-1"), 3, **options)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    loaded(str(tmp_path / "step-1"), 2, precision="bf16")


@on_ranks(2)
def test_other_frozen_parameters_are_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    saved(str(folder), 3)
    model, optimizer = made(3)
    with zeroshard.gathered(model, write=True), torch.no_grad():
        weight = model.blocks[1].up.weight
        weight.copy_(weight.flip(0))  # the same elements in other places
    before = zeroshard.full_state_dict(model)
    with pytest.raises(
        CheckpointError, match=r"frozen 'blocks\.1\.up\.weight', which has other values here; .*weights="
    ):
        zeroshard.load(folder, model, optimizer)
    after = zeroshard.full_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(CheckpointError, match=r"frozen in float32, which is bfloat16 here; use that precision"):
        zeroshard.load(folder, made(3, precision="bf16")[0])
    with pytest.raises(CheckpointError, match=r"had frozen and this run trains"):
        zeroshard.load(folder, made(3, trained="")[0])
    zeroshard.load(folder, made(3)[0], random=False)


@on_ranks(2)
def test_ranks_that_do_not_agree_on_frozen_parameters_are_told(tmp_path: Path) -> None:
    model, optimizer = made(1)
    with pytest.raises(ValueError, match=r"frozen=(True|False) on this rank, and not on all"):
        zeroshard.save(tmp_path / "step-1", model, optimizer, frozen=dist.get_rank() == 0)
    zeroshard.save(tmp_path / "step-1", model, optimizer, frozen=False)


@on_ranks(1)
def test_one_element_that_differs_gives_another_sum() -> None:
    for dtype in ("fp32", "bf16"):
        model, _ = made(1, precision=dtype)
        runtime = runtime_of(model)
        before = table_of(runtime, [sums_of(runtime)])
        assert difference(before, table_of(runtime, [sums_of(runtime)])) is None
        for name in before:
            with zeroshard.gathered(model, write=True), torch.no_grad():
                value = dict(model.named_parameters())[name].view(-1)[-1]
                old = value.clone()
                value.copy_(torch.nextafter(old, torch.full_like(old, 9)))
            assert repr(name) in str(difference(before, table_of(runtime, [sums_of(runtime)])))
            with zeroshard.gathered(model, write=True), torch.no_grad():
                dict(model.named_parameters())[name].view(-1)[-1].copy_(old)
        assert difference(before, table_of(runtime, [sums_of(runtime)])) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_signs_that_change_together_give_another_sum(dtype: torch.dtype) -> None:
    values = torch.arange(1.0, 9.0).to(dtype)
    flipped = values.clone()
    flipped[[2, 5]] *= -1
    assert frozen_sum(values, 0) != frozen_sum(flipped, 0)
    assert frozen_sum(values, 0) == frozen_sum(values[:3], 0) + frozen_sum(values[3:], 3)


@on_ranks(1)
def test_a_frozen_part_of_an_adapter_that_was_left_out_is_not_exported_in_silence(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)  # as LoRA-FA trains
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model, optimizer = zeroshard.shard(model, optimizer, stage=2)
    zeroshard.save(tmp_path / "step-1", model, optimizer, frozen=False)
    with pytest.raises(
        CheckpointError, match=r"leaves out .*lora_A.*a frozen part of the adapter .default.; save it whole"
    ):
        export(tmp_path / "step-1", tmp_path / "out", adapter="default")
    assert not (tmp_path / "out").exists()


@on_ranks(1)
def test_an_export_of_what_is_left_out_is_refused_with_the_remedy(tmp_path: Path) -> None:
    saved(str(tmp_path / "step-1"), 1)
    with pytest.raises(
        CheckpointError, match=r"leaves out frozen parameters, 'first\.weight' and \d+ more.*--adapter-only"
    ):
        export(tmp_path / "step-1", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _number(entry: dict[str, Any]) -> None:
    entry["sum"] = 5


def _no_shape(entry: dict[str, Any]) -> None:
    del entry["shape"]


def _negative(entry: dict[str, Any]) -> None:
    entry["shape"] = [-1]


@pytest.mark.parametrize("change", [_number, _no_shape, _negative])
@on_ranks(1)
def test_a_forged_table_is_refused(change: Any, tmp_path: Path) -> None:
    from tests.storage.forging import forge

    folder = tmp_path / "step-1"
    saved(str(folder), 1)
    forge(folder, lambda index: change(next(iter(index["parts"][0]["values"]["frozen"].values()))))
    with pytest.raises(CheckpointError, match=r"frozen\.first\.weight"):
        zeroshard.load(folder, made(1)[0])
