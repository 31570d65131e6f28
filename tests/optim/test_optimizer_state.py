"""The sharded optimizer as users know optimizers: handles, groups and state dicts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.matrix import Stages, in_stages, slow
from tests.models import loss_of, net
from tests.ranks import on_ranks
from tests.training import (
    STAGES,
    Make,
    Scaled,
    adamw,
    assert_same,
    sgd,
    shard,
    train,
    trained_plainly,
    weights,
)


@in_stages
@on_ranks(2)
def test_the_optimizer_given_to_shard_refuses_to_step(stages: Stages) -> None:
    for stage in stages:
        model = net(depth=2)
        old = sgd(model.parameters())
        model, new = zeroshard.shard(model, old, stage=stage)
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match=r"step\(\) on the optimizer that shard\(\) returned"):
            old.step()
        new.step()
        assert_same(weights(model), dict(trained_plainly(1).state_dict()))


@on_ranks(2)
def test_the_optimizer_given_to_shard_does_not_load_or_give_an_empty_state_silently() -> None:
    model = net(depth=2)
    old = adamw(model.parameters())
    model, new = zeroshard.shard(model, old, stage=2)
    train(model, new, 0)
    state = new.state_dict()
    assert state["state"]
    with pytest.raises(RuntimeError, match="shard"):
        old.load_state_dict(state)
    with pytest.raises(RuntimeError, match="shard"):
        old.state_dict()


@in_stages
@on_ranks(2)
def test_parameter_groups_cannot_be_added(stages: Stages) -> None:
    for stage in stages:
        _, optimizer = shard(stage=stage)
        with pytest.raises(RuntimeError, match=r"before zeroshard\.shard\(\)"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        assert len(optimizer.param_groups) == 1


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def grouped_adamw(parameters: Any) -> torch.optim.Optimizer:
    members = list(parameters)
    return torch.optim.AdamW([{"params": members[1::2], "lr": 0.03}, {"params": members[::2]}], lr=1e-2, amsgrad=True)


STATEFUL = {"adamw": adamw, "momentum": momentum, "groups": grouped_adamw, "asgd": torch.optim.ASGD}


def same_state(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, Tensor):
        return isinstance(ours, Tensor) and ours.dtype is theirs.dtype and torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same_state(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(same_state(a, b) for a, b in zip(ours, theirs, strict=True))
    return bool(ours == theirs)


@in_stages
@pytest.mark.parametrize("name", STATEFUL)
@on_ranks(2)
def test_the_optimizers_state_dict_is_that_of_the_unsharded_one(stages: Stages, name: str) -> None:
    plain = net(depth=2)
    ddp, optimizer = DistributedDataParallel(plain), STATEFUL[name](plain.parameters())
    for step in range(2):
        train(ddp, optimizer, step)
    for stage in stages:
        model, sharded = shard(STATEFUL[name], stage=stage)
        for step in range(2):
            train(model, sharded, step)
        assert same_state(sharded.state_dict(), optimizer.state_dict()), f"stage {stage}"


@on_ranks(2)
def test_the_optimizers_state_dict_loads_into_every_other_stage_and_into_plain_torch() -> None:
    expected = dict(trained_plainly(4, adamw).state_dict())
    for origin in STAGES:
        model, optimizer = shard(adamw, stage=origin)
        for step in range(2):
            train(model, optimizer, step)
        state, parameters = copy.deepcopy(optimizer.state_dict()), weights(model)
        for stage in STAGES:
            other = net(depth=2)
            other.load_state_dict(parameters)
            other, resumed = zeroshard.shard(other, adamw(other.parameters()), stage=stage)
            resumed.load_state_dict(state)
            assert same_state(resumed.state_dict(), state)
            for step in (2, 3):
                train(other, resumed, step)
            assert_same(weights(other), expected)
        plain = net(depth=2)
        plain.load_state_dict(parameters)
        unsharded = adamw(plain.parameters())
        unsharded.load_state_dict(state)
        ddp = DistributedDataParallel(plain)
        for step in (2, 3):
            train(ddp, unsharded, step)
        assert_same(dict(plain.state_dict()), expected)


@pytest.mark.parametrize("make", [adamw, slow(sgd), slow(momentum)])
@on_ranks(2)
def test_the_optimizers_state_dict_of_sixteen_bit_parameters_carries_the_masters_everywhere(make: Make) -> None:
    expected: dict[str, Tensor] | None = None
    for origin in STAGES:
        model, optimizer = shard(make, stage=origin, precision="bf16")
        for step in range(2):
            train(model, optimizer, step)
        state = copy.deepcopy(optimizer.state_dict())
        for (_, value), (name, shown) in zip(sorted(state["state"].items()), weights(model).items(), strict=True):
            assert value["master"].dtype is torch.float32, name
            assert torch.equal(value["master"].bfloat16(), shown), name
        for step in (2, 3):
            train(model, optimizer, step)
        expected = expected or weights(model)
        assert_same(weights(model), expected)
        for stage in STAGES:
            other, resumed = shard(make, stage=stage, precision="bf16")
            train(other, resumed, 8)
            resumed.load_state_dict(state)  # directly after a step, while its result is being published
            assert same_state(resumed.state_dict(), state)
            for step in (2, 3):
                train(other, resumed, step)
            assert_same(weights(other), expected)


@in_stages
@on_ranks(2)
def test_the_state_of_scalar_and_empty_parameters_round_trips(stages: Stages) -> None:
    def build() -> Scaled:
        torch.manual_seed(1)
        model = Scaled()
        model.nothing = nn.Parameter(torch.empty(0, 3))
        return model

    plain = build()
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    for make in (adamw, torch.optim.NAdam):
        plain = build()
        ddp, optimizer = DistributedDataParallel(plain, find_unused_parameters=True), make(plain.parameters())
        train(ddp, optimizer, 0)
        unsharded = copy.deepcopy(optimizer.state_dict())
        train(ddp, optimizer, 1)
        for stage in stages:
            model = build()
            model, sharded = zeroshard.shard(model, make(model.parameters()), stage=stage)
            train(model, sharded, 0)
            assert same_state(sharded.state_dict(), unsharded), f"stage {stage}"
            sharded.load_state_dict(unsharded)
            train(model, sharded, 1)
            assert_same(weights(model), dict(plain.state_dict()))


@in_stages
@on_ranks(2)
def test_loaded_state_is_a_copy_and_settings_are_taken_with_it(stages: Stages) -> None:
    for stage in stages:
        model, optimizer = shard(adamw, stage=stage)
        train(model, optimizer, 0)
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.5
        before = copy.deepcopy(state)
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.5
        train(model, optimizer, 1)
        assert same_state(state, before), f"stage {stage}: training changed the loaded dict"


@in_stages
@on_ranks(2)
def test_a_state_dict_of_other_groups_is_refused(stages: Stages) -> None:
    for stage in stages:
        _, optimizer = shard(adamw, stage=stage)
        other = nn.Linear(2, 2)
        with pytest.raises(ValueError, match="groups"):
            optimizer.load_state_dict(adamw(other.parameters()).state_dict())


@in_stages
@on_ranks(2)
def test_an_optimizer_built_from_named_parameters_keeps_the_names(stages: Stages) -> None:
    plain = net(depth=2)
    expected = torch.optim.AdamW(plain.named_parameters())
    train(DistributedDataParallel(plain), expected, 0)
    for stage in stages:
        model = net(depth=2)
        model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.named_parameters()), stage=stage)
        train(model, optimizer, 0)
        assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
        assert same_state(optimizer.state_dict(), expected.state_dict())


@pytest.mark.parametrize("options", [{"offload": "cpu"}, {"precision": "bf16"}], ids=["offload", "bf16"])
def test_a_parameter_that_has_made_no_step_has_no_moments_in_a_state_dict(options: dict[str, Any]) -> None:
    model = net(depth=2)
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=2, **options)
    unused = next(model.parameters())
    for number in range(2):
        loss_of(model, number).backward()
        if number == 0:
            unused.grad = None
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state_dict()
        assert ("exp_avg" in state["state"].get(0, {})) == ("step" in state["state"].get(0, {})) == bool(number)
        optimizer.load_state_dict(state)
    assert float(optimizer.state_dict()["state"][0]["step"]) == 1


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_groups_that_are_replaced_count_from_the_next_step_on(offload: str | None) -> None:
    model = net(depth=2)
    model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=2, offload=offload)
    train(model, optimizer, 1)
    before = weights(model)
    optimizer.param_groups = [{**group, "lr": 0.0} for group in optimizer.param_groups]
    train(model, optimizer, 1)
    assert_same(weights(model), before)
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.1}
    train(model, optimizer, 1)
    assert any(not torch.equal(value, before[name]) for name, value in weights(model).items())
