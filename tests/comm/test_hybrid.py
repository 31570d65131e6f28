"""A two-dimensional mesh: states divided inside a group of ranks, replicated between groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.matrix import slow
from tests.models import loss_of, net
from tests.ranks import on_ranks


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(shape: tuple[int, int], **options: Any) -> tuple[Any, Any]:
    model = net()
    mesh = init_device_mesh("cpu", shape)
    return zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), mesh=mesh, **options)


@pytest.mark.parametrize("shape", [(2, 2), slow((1, 4)), slow((4, 1))])
@on_ranks(4)
def test_a_mesh_trains_as_ddp_does_in_every_stage(shape: tuple[int, int]) -> None:
    plain = net()
    ddp = DistributedDataParallel(plain)
    train(ddp, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    for stage in (1, 2, 3):
        model, optimizer = sharded(shape, stage=stage, clip_grad_norm=1e9)
        train(model, optimizer)
        for name, value in zeroshard.full_state_dict(model).items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)


@on_ranks(4)
def test_volume_inside_and_between_groups_is_counted_apart() -> None:
    for stage, inside in ((1, 2), (2, 2), (3, 3)):
        keep: dict[str, Any] = {"keep": ()} if stage == 3 else {}
        model, optimizer = sharded((2, 2), stage=stage, **keep)
        train(model, optimizer)
        stats = zeroshard.stats(model)
        assert stats.volume_elements == inside * stats.padded_parameters
        assert set(stats.volume_between) == {"all_reduce"}
        # Each rank averages its half of the gradients with the other group: an all-reduce, counted twice.
        assert stats.volume_between["all_reduce"].elements == 2 * stats.padded_parameters // 2


@on_ranks(4)
def test_memory_is_divided_by_the_group_not_by_the_world() -> None:
    for shape, divisor in (((2, 2), 2), ((1, 4), 4)):
        model, optimizer = sharded(shape, stage=3, precision="bf16")
        train(model, optimizer, steps=2)
        stats = zeroshard.stats(model)
        assert stats.memory_at_step is not None
        assert stats.memory_at_step.parameters == 2 * stats.padded_parameters / divisor


@on_ranks(4)
def test_clipping_uses_the_norm_of_the_whole_gradient_once() -> None:
    norms = []
    for shape in ((2, 2), (1, 4)):
        model, optimizer = sharded(shape, stage=2, clip_grad_norm=0.5)
        loss_of(model, 0).backward()
        optimizer.step()
        norms.append(zeroshard.stats(model).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@on_ranks(2)
def test_a_mesh_that_does_not_fit_is_refused() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="mesh has no effect in stage 0"):
        zeroshard.shard(model, optimizer, stage=0, mesh=init_device_mesh("cpu", (1, 2)))
    with pytest.raises(ValueError, match="two dimensions"):
        zeroshard.shard(model, optimizer, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="two dimensions"):
        zeroshard.shard(model, optimizer, mesh="2x1")
    with pytest.raises(ValueError, match="not the 2 ranks"):
        zeroshard.shard(model, optimizer, mesh=DeviceMesh("cpu", torch.tensor([[0]]), _init_backend=False))
