"""The built-in GPT under tensor parallelism computes what it computes alone."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.ranks import on_ranks
from zeroshard.config.job import ModelConfig
from zeroshard.train.gpt import GPT
from zeroshard.train.gpt.tensor_parallel import parallelise


def tokens(index: int, step: int = 0) -> torch.Tensor:
    return torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(10 * step + index))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@on_ranks(4)
def test_a_gpt_on_two_by_two_ranks_trains_as_on_one(tied: bool) -> None:
    config = ModelConfig(layers=2, hidden=32, heads=4, sequence=16, vocabulary=257, tied=tied, checkpointing=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    index = mesh["data"].get_local_rank()
    with torch.device("meta"):
        alone = GPT(config)
    torch.manual_seed(1)
    alone, optimizer = zeroshard.shard(alone, torch.optim.SGD(alone.parameters(), lr=0.5, momentum=0.9), stage=0)
    losses = []
    for step in range(3):  # four ranks, of which two see the same
        loss = alone(tokens(index, step), tokens(index, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for stage in (0, 1, 2, 3):
        with torch.device("meta"):
            model = GPT(config)
        parallelise(model, mesh["model"])
        torch.manual_seed(1)
        model, optimizer = zeroshard.shard(
            model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), stage=stage, mesh=mesh["data"]
        )
        ours = []
        for step in range(3):
            loss = model(tokens(index, step), tokens(index, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ours.append(loss.item())
        torch.testing.assert_close(ours, losses, rtol=2e-5, atol=1e-6, msg=f"stage {stage}: {ours} {losses}")
        for name, value in zeroshard.full_state_dict(model).items():
            torch.testing.assert_close(value, zeroshard.full_state_dict(alone)[name], rtol=1e-4, atol=1e-5)
        matrices = 12 * 32 * 32 * 2 + 257 * 32 * (1 if tied else 2)
        assert zeroshard.stats(model).parameters == pytest.approx(matrices / 2, rel=0.1)


@on_ranks(2)
def test_a_degree_that_does_not_divide_the_heads_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = GPT(ModelConfig(layers=1, hidden=30, heads=3, sequence=8))
    with pytest.raises(ValueError, match="tensor parallelism of 2 does not divide the 3 heads"):
        parallelise(model, mesh)
