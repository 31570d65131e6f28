"""Small values that the hosts of all ranks exchange: any number of ranks, any size, in bounded time."""

from __future__ import annotations

import tempfile
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.comm.test_disagreement import quick_beats
from tests.models import loss_of
from tests.ranks import on_ranks
from tests.training import adamw, shard, train
from zeroshard.comm.exchange import HEAD_BYTES, Exchange
from zeroshard.comm.fabric import Fabric

SIZES = (0, 1, HEAD_BYTES // 8 - 2, HEAD_BYTES // 8 - 1, HEAD_BYTES // 8, 5 * HEAD_BYTES)
"""Numbers of integers: none, one, around what a first part holds, and many parts."""


def exchange_everything() -> None:
    fabric, rank, world = Fabric(torch.device("cpu"), 30.0), dist.get_rank(), dist.get_world_size()
    for size in SIZES:
        mine = [(index * 7919 + rank * 104729) % 1009 - 500 for index in range(size)]
        everybody = [[(index * 7919 + r * 104729) % 1009 - 500 for index in range(size)] for r in range(world)]
        assert fabric.maximum(mine) == [max(column) for column in zip(*everybody, strict=True)]
    long = "x" * (3 * HEAD_BYTES)
    assert fabric.gather_objects((rank, long)) == [(r, long) for r in range(world)]
    assert fabric.gather_objects(None) == [None] * world
    assert fabric.from_rank_zero({"rank": rank, "long": long}) == {"rank": 0, "long": long}
    assert fabric.from_rank_zero(None) is None


@on_ranks(2)
def test_two_ranks_exchange_values_of_any_size() -> None:
    exchange_everything()


@on_ranks(3)
def test_ranks_that_are_no_power_of_two_exchange_values() -> None:
    exchange_everything()


@on_ranks(4)
def test_four_ranks_exchange_values_in_two_rounds() -> None:
    exchange_everything()


@on_ranks(3)
def test_a_rank_that_does_not_come_is_named_in_time_and_nothing_is_exchanged_afterwards() -> None:
    with quick_beats():
        fabric = Fabric(torch.device("cpu"), 1.0)
        fabric.maximum([0])  # all ranks have begun
        if dist.get_rank() != 1:
            began = time.monotonic()
            with pytest.raises(zeroshard.StallError, match=r"waited for a test .*rank 1 is alive"):
                fabric.maximum([1], "a test")
            assert time.monotonic() - began < 5.0
            with pytest.raises(zeroshard.StallError, match="since an earlier one failed"):
                fabric.gather_objects(1)
        dist.barrier()


@on_ranks(2)
def test_ranks_that_exchange_different_things_are_told_what_the_other_does_and_nothing_is_mixed_up() -> None:
    fabric = Fabric(torch.device("cpu"), 30.0)
    other = 1 - dist.get_rank()
    said = rf"rank {dist.get_rank()} came to .*, and rank {other} came to .*all ranks must make the same calls"
    mine = [7] if dist.get_rank() == 0 else [1, 2, 9]
    with pytest.raises(zeroshard.DisagreementError, match=said):
        fabric.maximum(mine, "a test")
    with pytest.raises(zeroshard.StallError, match="since an earlier one failed"):
        fabric.maximum([1], "a test")


@on_ranks(2)
def test_a_save_on_one_rank_and_a_step_on_the_other_are_both_named() -> None:
    model, optimizer = shard(adamw, stage=2)
    train(model, optimizer, 0)
    loss_of(model, 1).backward()
    save = partial(zeroshard.save, tempfile.gettempdir() + "/never", model, optimizer)
    call = save if dist.get_rank() == 0 else optimizer.step
    with pytest.raises(zeroshard.DisagreementError, match=r"came to (the agreement on gradients|an exchange of dec)"):
        call()


@on_ranks(2)
def test_an_exchange_that_was_interrupted_is_not_mixed_up_with_the_next() -> None:
    fabric = Fabric(torch.device("cpu"), 5.0)
    fabric.maximum([0])  # connected
    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Exchange, "_receive", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                fabric.maximum([100])
        with pytest.raises(zeroshard.StallError, match="since an earlier one failed"):
            fabric.maximum([10])
    dist.barrier()
