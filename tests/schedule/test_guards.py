"""What users do to a sharded model besides training it is right, or raises and names the remedy."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.matrix import Stages, in_stages
from tests.models import Net, loss_of, net
from tests.ranks import on_ranks
from tests.schedule.moments import MOMENTS, at_moment
from tests.training import (
    INNER,
    adamw,
    another_state,
    assert_nobody_noticed,
    assert_same,
    refused,
    sgd,
    shard,
    train,
    trained_plainly,
    trained_plainly_from,
    weights,
)

# -- copies, pickles and conversions ----------------------------------------------------------------------------------

COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda module: torch.save(module, io.BytesIO()),
}


@in_stages
@pytest.mark.parametrize("way", COPIES)
@on_ranks(2)
def test_a_sharded_model_or_a_part_of_it_refuses_to_be_copied_and_names_the_remedy(stages: Stages, way: str) -> None:
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        for module in (model, model.blocks, model.blocks[0], model.last):
            with pytest.raises(Exception, match="full_state_dict") as caught:
                COPIES[way](module)
            assert not isinstance(caught.value, AssertionError)
        assert_nobody_noticed(model, optimizer, dict(trained_plainly(1).state_dict()))


@pytest.mark.parametrize("way", COPIES)
def test_a_model_sharded_in_a_world_of_one_refuses_to_be_copied_too(way: str) -> None:
    model, _ = shard(stage=3)
    with pytest.raises(Exception, match="full_state_dict"):
        COPIES[way](model)


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "to dtype": lambda m: m.to(torch.float64),
    "to device": lambda m: m.to("meta"),
    "to dtype on the same device": lambda m: m.to("cpu:0", torch.float16),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "share_memory": lambda m: m.share_memory(),
}


@in_stages
@on_ranks(2)
def test_converting_a_sharded_model_or_a_part_of_it_raises_and_names_the_remedy(stages: Stages) -> None:
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        for name, convert in CONVERSIONS.items():
            for module in (model, model.blocks, model.blocks[0], model.blocks[0].up):
                with refused(f"{name} in stage {stage}", r"zeroshard\.shard\(\)"):
                    convert(module)
        assert_nobody_noticed(model, optimizer, dict(trained_plainly(1).state_dict()))


@in_stages
@on_ranks(2)
def test_another_memory_format_raises_or_trains_on(stages: Stages) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 2))

    images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(5))
    for stage in stages:
        model = build()
        model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        with suppress(RuntimeError):
            model.to(memory_format=torch.channels_last)
        before = weights(model)
        for _ in range(2):
            model(images).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        after = weights(model)
        assert not torch.equal(before["0.weight"], after["0.weight"])
        plain = build()
        plain.load_state_dict(after)
        torch.testing.assert_close(model(images), plain(images))


@in_stages
@on_ranks(2)
def test_conversions_that_change_nothing_are_fine_at_any_moment(stages: Stages) -> None:
    expected = dict(trained_plainly(2).state_dict())
    for stage in stages:
        model, optimizer = shard(stage=stage)

        def convert(model: Net = model) -> None:
            assert model.to("cpu") is model
            assert model.to("cpu:0") is model
            assert model.to(torch.device("cpu", 0), torch.float32, non_blocking=True) is model
            assert model.to(torch.float32) is model
            assert model.float() is model
            assert model.cpu() is model
            assert model.blocks[0].to("cpu", torch.float32) is model.blocks[0]
            assert model.last.to("cpu:0") is model.last

        for step in range(2):
            convert()
            loss = loss_of(model, step)
            convert()
            loss.backward()
            convert()
            optimizer.step()
            convert()
            optimizer.zero_grad()
        assert_same(weights(model), expected)


# -- state dicts of the model -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_state_dict_is_right_directly_after_a_step_where_parameters_are_whole_at_rest() -> None:
    expected = dict(trained_plainly(2).state_dict())
    for stage in (0, 1, 2):
        model, optimizer = shard(stage=stage)
        for step in range(2):
            train(model, optimizer, step)
        assert_same(model.state_dict(), expected)
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        train(model, optimizer, 1)
        part = model.blocks[1].state_dict()
        assert_same(part, {name: expected[f"blocks.1.{name}"] for name in part})


@on_ranks(2)
def test_a_state_dict_in_stage_three_is_right_at_every_moment_and_can_be_used_afterwards() -> None:
    for moment in MOMENTS:
        model, optimizer, _ = at_moment(moment, stage=3)
        states = {name: model.get_submodule(name).state_dict() for name in ("", "blocks.0")}
        expected = weights(model)
        optimizer.zero_grad()
        train(model, optimizer, 5)
        assert_same(states[""], expected)
        for name, value in states["blocks.0"].items():
            assert torch.equal(value, expected[f"blocks.0.{name}"]), (moment, name)


@in_stages
@on_ranks(2)
def test_a_state_dict_inside_gathered_is_right_and_can_be_used_afterwards(stages: Stages) -> None:
    expected = dict(trained_plainly(1).state_dict())
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        with zeroshard.gathered(model):
            state = model.state_dict()
            assert_same(state, expected)
        assert_same(state, expected)


@on_ranks(2)
def test_a_state_dict_that_rank_zero_loads_alone_in_stage_three_is_refused_and_changes_nothing() -> None:
    before = dict(trained_plainly(1).state_dict())
    model, optimizer, _ = at_moment("step", stage=3, prefetch=1)  # the second block is not gathered yet
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"load_state_dict\(\).*rank 1 did not"):
            model.blocks[1].load_state_dict(net(depth=2).blocks[1].state_dict())
    assert_nobody_noticed(model, optimizer, before)


@in_stages
@on_ranks(2)
def test_a_state_dict_loaded_inside_gathered_counts_and_survives_the_next_step(stages: Stages) -> None:
    state = another_state()
    expected = trained_plainly_from(state, 1)
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        with zeroshard.gathered(model, write=True):
            model.load_state_dict(state)
        assert_same(weights(model), state)
        train(model, optimizer, 1)
        assert_same(weights(model), expected)


@in_stages
@on_ranks(2)
def test_a_state_dict_loaded_directly_counts_and_survives_the_next_step(stages: Stages) -> None:
    state = another_state()
    expected = trained_plainly_from(state, 1)
    for stage in stages:
        for moment in MOMENTS:
            model, optimizer, _ = at_moment(moment, stage)
            model.get_parameter(INNER).norm()  # a unit that was read before
            model.load_state_dict(state)
            assert_same(weights(model), state)
            assert_same(dict(model.state_dict()), state)
            optimizer.zero_grad()
            train(model, optimizer, 1)
            assert_same(weights(model), expected)


@in_stages
@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"offload": "cpu"}], ids=str)
@on_ranks(2)
def test_a_loaded_state_dict_reaches_the_masters(stages: Stages, options: dict[str, Any]) -> None:
    state = another_state()
    for stage in stages:
        model, optimizer = shard(stage=stage, **options)
        train(model, optimizer, 0)
        model.load_state_dict(state)
        dtype = torch.bfloat16 if "precision" in options else torch.float32
        rounded = {name: value.to(dtype) for name, value in state.items()}
        assert_same(weights(model), rounded)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        train(model, optimizer, 1)
        assert_same(weights(model), rounded)


@in_stages
@on_ranks(2)
def test_loading_with_assign_raises_and_leaves_the_model_as_it_was(stages: Stages) -> None:
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        before = weights(model)
        with pytest.raises(RuntimeError, match="assign"):
            model.load_state_dict(another_state(), assign=True)
        with pytest.raises(RuntimeError, match="assign"), zeroshard.gathered(model, write=True):
            model.load_state_dict(another_state(), assign=True)
        assert_nobody_noticed(model, optimizer, before)


# -- memory -----------------------------------------------------------------------------------------------------------


@in_stages
@on_ranks(2)
def test_a_sharded_model_that_nobody_holds_is_freed(stages: Stages) -> None:
    for stage in stages:
        model, optimizer = shard(adamw, stage=stage)
        train(model, optimizer, 0)
        references = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.blocks[0].up.weight)
        del model, optimizer
        gc.collect()
        assert [reference() for reference in references] == [None] * 3, f"stage {stage}"
