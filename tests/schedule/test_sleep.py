"""States that sleep in host memory between phases of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroshard
from tests.matrix import matrix
from tests.models import batch, loss_of
from tests.ranks import on_ranks
from tests.storages import live_bytes
from tests.training import INNER, Make, adamw, shard, train, weights
from zeroshard import Offload, Precision

ASLEEP = r"sleep in host memory; call zeroshard\.restore_states\(model\) first"


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(make: Make, sleeps: bool, **options: Any) -> dict[str, torch.Tensor]:
    model, optimizer = shard(make, **options)
    for step in range(5):
        train(model, optimizer, step)
        if sleeps and step in (0, 2, 3):
            zeroshard.offload_states(model)
            zeroshard.restore_states(model)
    zeroshard.synchronize(model)
    return weights(model)


@matrix(
    stage=(0, 1, 2, 3),
    options=(
        {},
        {"precision": "bf16"},
        {"offload": "cpu", "precision": "bf16", "clip_grad_norm": 0.1},
        {"offload": Offload(delayed_update_after=1), "precision": "bf16"},
        {"offload": Offload(split_master=True, read_back=True), "precision": "bf16"},
        {"offload": Offload(host_fraction=0.5), "precision": "bf16"},
        {"offload": Offload(host_fraction=0.5, moments="8bit"), "precision": "bf16"},
    ),
)
@on_ranks(2)
def test_training_goes_on_with_the_same_bits(stage: int, options: dict[str, Any]) -> None:
    expected = trained(adamw, False, stage=stage, **options)
    found = trained(adamw, True, stage=stage, **options)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    "options",
    [
        {"offload": Offload(parameters="cpu"), "precision": "bf16"},
        {"precision": Precision(parameters=torch.bfloat16, cast_on_gather=True)},
        {"prefetch": 4},
    ],
    ids=["parameters on the host", "cast on gather", "prefetch"],
)
@on_ranks(2)
def test_training_goes_on_where_shards_have_no_memory_of_their_own(options: dict[str, Any]) -> None:
    expected = trained(momentum, False, stage=3, **options)
    found = trained(momentum, True, stage=3, **options)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@matrix(stage=(0, 1, 2, 3), options=({}, {"precision": "bf16"}, {"offload": "cpu", "precision": "bf16"}))
@on_ranks(2)
def test_nothing_of_the_states_stays_on_the_device(stage: int, options: dict[str, Any]) -> None:
    model, optimizer = shard(adamw, stage=stage, **options)
    for step in range(2):
        train(model, optimizer, step)
    zeroshard.synchronize(model)
    assert optimizer.state  # tensors of the steps that the host has counted are made with the first question
    awake, held = zeroshard.stats(model), live_bytes()
    assert awake.memory.parameters > 0
    zeroshard.offload_states(model)
    asleep = zeroshard.stats(model)
    assert asleep.memory.total == 0
    assert asleep.host_memory is not None
    on_host = 0 if awake.host_memory is None else awake.host_memory.total
    assert asleep.host_memory.total == on_host + awake.memory.total - awake.memory.gathered
    # Every storage has one copy, and the copy has taken its place: a forgotten view would keep the original too.
    assert live_bytes() <= held
    zeroshard.offload_states(model)  # has nothing to do
    zeroshard.restore_states(model)
    assert zeroshard.stats(model).memory == zeroshard.Memory(**{**vars(awake.memory), "gathered": 0})
    assert live_bytes() <= held
    zeroshard.restore_states(model)
    train(model, optimizer, 2)


def needs(model: Any, optimizer: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    def gathered() -> None:
        with zeroshard.gathered(model, write=True):
            pass

    return {
        "the parameters of": lambda: model(batch(0)),
        "step()": lambda: optimizer.step(),
        "sum()": lambda: model.get_parameter(INNER).sum(),
        ".data": lambda: model.get_parameter(INNER).data,
        "save()": lambda: zeroshard.save(folder / "saved", model, optimizer),
        "load()": lambda: zeroshard.load(folder, model, optimizer),
        "detach()": lambda: model.state_dict(),
        "load_state_dict()": lambda: optimizer.load_state_dict({}),
        "optimizer.state_dict()": lambda: optimizer.state_dict(),
        "gathered()": gathered,
        "whole_parameters()": lambda: zeroshard.whole_parameters(model),
        "clip_grad_norm_()": lambda: optimizer.clip_grad_norm_(1.0),
    }


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("offload", [None, "cpu"], ids=["on the device", "offloaded"])
@on_ranks(2)
def test_who_needs_sleeping_states_is_told_what_to_call(stage: int, offload: Any, tmp_path: Path) -> None:
    model, optimizer = shard(adamw, stage=stage, offload=offload)
    train(model, optimizer, 0)
    before = weights(model)
    zeroshard.offload_states(model)
    for words, call in needs(model, optimizer, tmp_path).items():
        with pytest.raises(RuntimeError, match=ASLEEP) as error:
            call()
        assert words in str(error.value)
    with pytest.raises(RuntimeError, match=ASLEEP):
        zeroshard.full_state_dict(model)
    with pytest.raises(RuntimeError, match=ASLEEP):
        model.load_state_dict(before)
    optimizer.zero_grad()
    assert "its value is not here" in repr(model.get_parameter(INNER))
    assert not list(tmp_path.iterdir())
    zeroshard.restore_states(model)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    train(model, optimizer, 1)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_gradients_that_wait_for_their_step_are_not_lost(stage: int) -> None:
    model, optimizer = shard(adamw, stage=stage)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"offload_states\(\) between backward\(\) and step\(\)"):
        zeroshard.offload_states(model)
    optimizer.step()
    zeroshard.offload_states(model)
    zeroshard.restore_states(model)
    train(model, optimizer, 1)


@on_ranks(2)
def test_a_graph_or_a_block_that_shows_parameters_is_named() -> None:
    model, _ = shard(adamw, stage=3)
    penalty = model.get_parameter(INNER).square().sum()
    with pytest.raises(RuntimeError, match=r"a graph of yours needs parameters of 'blocks\.0'"):
        zeroshard.offload_states(model)
    del penalty
    with zeroshard.gathered(model), pytest.raises(RuntimeError, match="leave the block first"):
        zeroshard.offload_states(model)
    zeroshard.offload_states(model)
    zeroshard.restore_states(model)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_a_backward_may_come_after_the_states_woke_up(stage: int) -> None:
    found = []
    for sleeps in (False, True):
        model, optimizer = shard(adamw, stage=stage)
        train(model, optimizer, 0)
        loss = loss_of(model, 1)
        if sleeps:
            zeroshard.offload_states(model)
            if stage == 3:
                with pytest.raises(RuntimeError, match=ASLEEP):
                    loss_of(model, 1)
            zeroshard.restore_states(model)
        loss.backward()
        optimizer.step()
        found.append(weights(model))
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())


@on_ranks(2)
def test_a_view_that_a_user_keeps_stays_readable() -> None:
    model, optimizer = shard(adamw, stage=1)
    train(model, optimizer, 0)
    view, state = model.get_parameter(INNER).detach(), list(optimizer.state)
    values, pieces = view.clone(), [piece.clone() for piece in state]
    zeroshard.offload_states(model)
    assert torch.equal(view, values)
    assert all(torch.equal(piece, before) for piece, before in zip(state, pieces, strict=True))
    zeroshard.restore_states(model)
    assert torch.equal(view, values)
    assert torch.equal(model.get_parameter(INNER), values)


@on_ranks(2)
def test_divided_matrices_sleep_too() -> None:
    found = []
    for sleeps in (False, True):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(7, 6), nn.Linear(6, 4))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=2, mesh=mesh["dp"], units=["0", "1"])
        whole = {}
        for step in range(3):
            train(model, optimizer, step)
            if sleeps:
                whole = dict(zeroshard.whole_parameters(model))
                zeroshard.offload_states(model)
                zeroshard.restore_states(model)
        found.append(weights(model))
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())
    assert all(torch.equal(whole[name], value) for name, value in found[0].items())


def test_without_room_on_the_host_nothing_falls_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = shard(adamw, stage=1)
    train(model, optimizer, 0)
    monkeypatch.setattr("zeroshard.system.machine.available_memory", lambda: 100)
    with pytest.raises(RuntimeError, match="free host memory"):
        zeroshard.offload_states(model)
    train(model, optimizer, 1)


def test_a_frozen_model_sleeps_too() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).requires_grad_(False)
    model, _ = zeroshard.shard(model, stage=3)
    x = torch.ones(1, 8)
    expected = model(x)
    zeroshard.offload_states(model)
    assert zeroshard.stats(model).memory.total == 0
    with pytest.raises(RuntimeError, match=ASLEEP):
        model(x)
    zeroshard.restore_states(model)
    assert torch.equal(model(x), expected)
