"""Every transport gives the same results."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import on_ranks
from zeroshard.comm.transport import Collectives, Finish, PointToPoint, Transport
from zeroshard.system.waits import Waits

WORLD = 3
SHARD = 4
CPU = torch.device("cpu")


def complete(finish: Finish | None) -> None:
    if finish is not None:
        finish()


def values_of(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(WORLD * SHARD, dtype=dtype) + 3 * rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@on_ranks(WORLD)
def test_messages_and_the_backends_collectives_gather_and_average_alike(dtype: torch.dtype) -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    mine = slice(rank * SHARD, (rank + 1) * SHARD)
    average = values_of(1, dtype)  # the ranks have x, x + 3 and x + 6
    transports: list[Transport] = [Collectives(group, "gloo"), PointToPoint(group, timedelta(seconds=30), Waits(CPU))]
    for transport in transports:
        whole = torch.zeros(WORLD * SHARD, dtype=dtype)
        complete(transport.all_gather(whole, average[mine].clone(), "a"))
        assert torch.equal(whole, average)

        whole, shard = values_of(rank, dtype), torch.zeros(SHARD, dtype=dtype)
        complete(transport.reduce_scatter(whole, shard, "b"))
        torch.testing.assert_close(shard, average[mine])

        whole = values_of(rank, dtype)
        complete(transport.all_reduce(whole, "c"))
        torch.testing.assert_close(whole, average)


@on_ranks(2)
def test_an_average_in_half_precision_does_not_overflow() -> None:
    group = dist.group.WORLD
    assert group is not None
    transports: list[Transport] = [Collectives(group, "gloo"), PointToPoint(group, timedelta(seconds=30), Waits(CPU))]
    for transport in transports:
        whole = torch.full((4,), 60000.0, dtype=torch.float16)
        complete(transport.all_reduce(whole, "a"))
        assert whole.tolist() == [60000.0] * 4
