"""One rank of a large world, alone in one process.

Sizes and volume are the same as in the real world. Gradients are this rank's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import zeroshard
from tests.models import loss_of, net
from zeroshard.comm.fabric import Fabric
from zeroshard.system import compat, compat_groups


class Operations(compat.OperationWatch):
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def see(self, tensors: list[Tensor]) -> None:
        self.count += 1


@pytest.fixture
def world_of_eight() -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    yield 8
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_of_eight_holds_and_moves_what_the_paper_says(stage: int, world_of_eight: int) -> None:
    model = net(width=64, depth=6)
    psi = sum(p.numel() for p in model.parameters())
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=stage, precision="bf16")
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = zeroshard.stats(model)
    assert stats.memory_at_step is not None
    world = world_of_eight
    expected = (
        2 * psi / (world if stage == 3 else 1)
        + 2 * psi / (world if stage >= 2 else 1)
        + 12 * psi / (world if stage >= 1 else 1)
    )
    assert stats.memory_at_step.model_states == pytest.approx(expected, rel=0.03)  # padding of small tensors
    factor = 2 if stage < 3 else 3 - stats.kept_parameters / stats.padded_parameters
    assert stats.volume_elements == pytest.approx(factor * stats.padded_parameters)


def test_values_of_ranks_that_are_not_there_are_taken_to_be_its_own(world_of_eight: int) -> None:
    lane = Fabric(torch.device("cpu"), stall_timeout=10.0).reduces
    whole, shard = torch.arange(2.0 * world_of_eight), torch.full((2,), math.nan)
    lane.reduce_scatter(whole, shard, "some").wait()
    assert shard.tolist() == [6.0, 7.0]
    lane.all_reduce(whole, "all").wait()
    assert torch.equal(whole, torch.arange(2.0 * world_of_eight))
    lane.all_gather(whole, shard, "some").wait()
    assert whole.tolist() == [6.0, 7.0] * world_of_eight
    mine = whole.fill_(math.nan)[6:8].fill_(2.0)  # the shard is a slice of the whole
    lane.all_gather(whole, mine, "some").wait()
    assert whole.tolist() == [2.0] * 2 * world_of_eight
    whole.copy_(torch.arange(2.0 * world_of_eight))
    lane.reduce_scatter(whole, mine, "some").wait()
    assert torch.equal(whole, torch.arange(2.0 * world_of_eight))


def test_a_gather_costs_as_many_operations_in_a_large_world_as_in_a_small_one() -> None:
    counts = []
    for world in (4, 256):
        with compat_groups.one_rank_of(world, 1):
            lane = Fabric(torch.device("cpu"), stall_timeout=10.0).gathers
            whole, shard = torch.zeros(world), torch.ones(1)
            with Operations() as seen:
                lane.all_gather(whole, shard, "some").wait()
            counts.append(seen.count)
    assert counts[0] == counts[1]


def test_without_a_process_group_it_is_a_world_of_one_and_parameters_stay_readable() -> None:
    for stage in (0, 1, 2, 3):
        model, plain = net(), net()
        other = torch.optim.AdamW(plain.parameters())
        model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=stage)
        for step in range(3):
            for each, each_optimizer in ((model, optimizer), (plain, other)):
                loss_of(each, step).backward()
                each_optimizer.step()
                each_optimizer.zero_grad()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        assert zeroshard.stats(model).volume == {}
