"""Ranks that do different things get an error that names rank, unit and cause. They never hang or swap data."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.models import Block, batch, loss_of, net
from tests.ranks import Pool, on_ranks
from zeroshard.comm import posts
from zeroshard.runtime import runtime_of

SHORT = 2.0
"""``stall_timeout`` in seconds. A healthy collective takes milliseconds here."""


@contextmanager
def quick_beats() -> Iterator[None]:
    """Ranks post often, so that a stall is explained sooner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(posts, "BEAT_SECONDS", 0.2)
        yield


class Reordered(nn.Module):
    """Rank 1 calls two equal-sized blocks in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(7) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        order = [0, 1, 2, 3] if dist.get_rank() == 0 else [0, 2, 1, 3]
        for number in order:
            x = self.blocks[number](x)
        return x


@on_ranks(2)
def test_another_order_of_units_in_stage_3_is_named_and_swaps_nothing() -> None:
    model = Reordered()
    with quick_beats():
        model, _ = zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=3, stall_timeout=SHORT)
        with pytest.raises(zeroshard.StallError, match=r"rank \d .*all_gather blocks\.\d"):
            model(batch(0)).sum().backward()


@on_ranks(2)
def test_another_order_of_units_on_a_rank_is_right_where_parameters_are_whole_at_rest() -> None:
    for stage in (0, 1, 2):
        torch.manual_seed(0)
        plain = Reordered()
        ddp, other = DistributedDataParallel(plain), torch.optim.SGD(plain.parameters(), lr=0.1)
        torch.manual_seed(0)
        model = Reordered()
        model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
        for step in range(3):
            for each, each_optimizer in ((model, optimizer), (ddp, other)):
                each(batch(step)).square().mean().backward()
                each_optimizer.step()
                each_optimizer.zero_grad()
        for name, value in zeroshard.full_state_dict(model).items():
            assert torch.equal(value, plain.state_dict()[name]), f"stage {stage}: {name}"


@on_ranks(2)
def test_a_rank_that_did_another_operation_is_named_before_anything_is_updated() -> None:
    model = net()
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=2, stall_timeout=SHORT)
    start = zeroshard.full_state_dict(model)
    loss_of(model, 0).backward()
    if dist.get_rank() == 1:  # as if two messages of equal size had been swapped, on a backend without tags
        lane = runtime_of(model).fabric.reduces
        lane.log[-1] = "reduce_scatter blocks.9"
        lane.hash ^= 1
    with pytest.raises(zeroshard.DisagreementError, match=r"rank 0: reduce_scatter .*rank 1: reduce_scatter blocks\.9"):
        optimizer.step()
    end = zeroshard.full_state_dict(model)
    assert all(torch.equal(start[name], end[name]) for name in start)


@on_ranks(2)
def test_a_different_number_of_backward_passes_is_named() -> None:
    model = net()
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=2, stall_timeout=SHORT)
    with zeroshard.no_sync(model):
        for micro in range(1 + dist.get_rank()):
            loss_of(model, micro).backward()
    with pytest.raises(zeroshard.DisagreementError, match="rank 0: 1, rank 1: 2"):
        optimizer.step()


@on_ranks(2)
def test_a_rank_that_misses_a_collective_is_named_after_stall_timeout() -> None:
    model = net()
    with quick_beats():
        model, _ = zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=3, stall_timeout=SHORT)
        if dist.get_rank() == 0:
            with pytest.raises(zeroshard.StallError, match=r"rank 0 waited for all_gather \(root\).*rank 1 is alive"):
                loss_of(model, 0)
        dist.barrier()  # rank 1 waits here and is alive


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "exited"])
def test_a_rank_that_was_killed_or_ended_is_named_by_the_others(how: str) -> None:
    messages = Pool.shared().run(_lose_a_rank, 2, {"how": how}, expect_death=1)
    assert "rank 1 has died or left" in messages[0]
    assert "blocks." in messages[0] or "(root)" in messages[0]


def _lose_a_rank(how: str) -> str:
    model = net()
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=3, stall_timeout=SHORT)
    loss_of(model, 0).backward()
    optimizer.step()
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)  # as after an uncaught exception
    try:
        loss_of(model, 1).backward()
        optimizer.step()
    except zeroshard.StallError as error:
        return str(error)
    return "no error"
