"""Whole parameters, one unit after the other, for inference engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.matrix import Stages, in_stages
from tests.models import Net, batch
from tests.ranks import on_ranks
from tests.storages import live_bytes
from tests.training import adamw, shard, train, weights

OFFLOADS: list[Any] = [None, "cpu"]


class Tied(Net):
    """The last layer has the weight of the first, as in most language models."""

    def __init__(self) -> None:
        super().__init__(width=5, depth=2, inputs=5, outputs=5)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.ones(3))


@in_stages
@pytest.mark.parametrize("offload", OFFLOADS, ids=["on the device", "offloaded"])
@on_ranks(2)
def test_names_and_values_are_those_of_the_state_dict(stages: Stages, offload: Any) -> None:
    for stage in stages:
        model, optimizer = shard(adamw, stage=stage, offload=offload, precision="bf16")
        train(model, optimizer, 0)
        found = dict(zeroshard.whole_parameters(model))
        expected = weights(model)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value)
            assert found[name].dtype is torch.bfloat16


@on_ranks(2)
def test_what_was_yielded_can_be_kept_and_never_changes() -> None:
    for stage in (1, 3):
        model, optimizer = shard(adamw, stage=stage)
        train(model, optimizer, 0)
        expected = weights(model)
        kept = dict(zeroshard.whole_parameters(model))
        for step in range(1, 4):
            train(model, optimizer, step)
        for name, value in expected.items():
            assert torch.equal(kept[name], value)


@on_ranks(2)
def test_a_tied_parameter_comes_once_under_its_first_name() -> None:
    torch.manual_seed(1)
    model = Tied()
    model, _ = zeroshard.shard(model, adamw(model.parameters()), stage=3)
    names = [name for name, _ in zeroshard.whole_parameters(model)]
    assert names.count("first.weight") == 1
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert "last.weight" not in names
    assert "scale" not in names


@in_stages
@on_ranks(2)
def test_a_loop_that_ends_early_leaves_training_as_it_was(stages: Stages) -> None:
    for stage in stages:
        trained = []
        for exports in (False, True):
            model, optimizer = shard(adamw, stage=stage)
            for step in range(3):
                train(model, optimizer, step)
                if exports:
                    for number, _ in enumerate(zeroshard.whole_parameters(model)):
                        if number == step * 3:
                            break
            trained.append(weights(model))
        for name, value in trained[0].items():
            assert torch.equal(trained[1][name], value)


@on_ranks(2)
def test_user_code_may_use_the_model_between_two_parameters() -> None:
    model, optimizer = shard(adamw, stage=3)
    expected = weights(model)
    found: dict[str, Tensor] = {}
    for name, value in zeroshard.whole_parameters(model):
        found[name] = value
        with torch.no_grad():
            model(batch(0))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    train(model, optimizer, 0)


@on_ranks(2)
def test_no_more_than_one_unit_of_copies_is_held_while_the_loop_runs() -> None:
    model = Net(width=64, depth=6)
    model, _ = zeroshard.shard(model, adamw(model.parameters()), stage=3)
    unit = 4 * max(sum(p.numel() for p in block.parameters()) for block in model.blocks)
    before = live_bytes()
    held = [live_bytes() - before for _name, _value in zeroshard.whole_parameters(model)]
    assert max(held) <= 1.1 * unit
    assert zeroshard.stats(model).memory.gathered == 0


@pytest.mark.slow
@on_ranks(2)
def test_a_rank_that_ends_its_loop_alone_is_named() -> None:
    model, _ = shard(adamw, stage=3, stall_timeout=2.0)
    if dist.get_rank() == 0:
        next(zeroshard.whole_parameters(model))
    else:
        with pytest.raises(zeroshard.StallError, match="rank 0"):
            list(zeroshard.whole_parameters(model))


def test_a_model_that_is_not_sharded_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="not sharded"):
        zeroshard.whole_parameters(nn.Linear(1, 1))
