"""A step that failed can be called again, and then does all its work. A step needs one agreement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.models import Block, batch, net
from tests.ranks import on_ranks
from tests.training import adamw, train, weights
from zeroshard.comm.fabric import Fabric
from zeroshard.runtime import runtime_of


@contextmanager
def failing_once(name: str) -> Iterator[None]:
    """The first call of a method of ``Fabric`` raises, on every rank alike."""
    method, calls = getattr(Fabric, name), []

    def failing(fabric: Fabric, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError("on purpose")
        return method(fabric, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fabric, name, failing)
        yield
    assert len(calls) > 1, f"{name} was not tried again"


class Upwards(nn.Module):
    """Calls its blocks from last to first, and the second one on rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number in (2, 1, 0):
            if number != 1 or dist.get_rank() == 0:
                x = self.blocks[number](x)
        return x


def trained(step_of: Callable[[torch.optim.Optimizer], None]) -> tuple[dict[str, Tensor], list[str]]:
    torch.manual_seed(3)
    model: nn.Module = Upwards()
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=2)
    model(batch(0)).square().mean().backward()
    step_of(optimizer)
    return weights(model), [flat.label for flat in runtime_of(model).reducer.order]


@pytest.mark.parametrize("method", ["maximum", "from_rank_zero"])
@on_ranks(2)
def test_a_step_whose_agreement_failed_agrees_when_it_is_called_again(method: str) -> None:
    def step(optimizer: torch.optim.Optimizer) -> None:
        with failing_once(method):
            with pytest.raises(ConnectionError):
                optimizer.step()
            optimizer.step()

    assert_equal = trained(lambda optimizer: optimizer.step())
    found = trained(step)
    assert found[1] == assert_equal[1] == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(torch.equal(found[0][name], value) for name, value in assert_equal[0].items())


@on_ranks(2)
def test_a_request_to_stop_reaches_all_ranks_with_the_agreement_of_a_step() -> None:
    model = net()
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=2)
    reducer = runtime_of(model).reducer
    train(model, optimizer, 0)
    assert not reducer.stop_agreed
    reducer.stop_asked = dist.get_rank() == 1
    agreements: list[int] = []
    maximum = Fabric.maximum
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fabric, "maximum", lambda self, *args: (agreements.append(1), maximum(self, *args))[1])
        train(model, optimizer, 1)
    assert reducer.stop_agreed
    assert len(agreements) == 1


def test_alone_a_request_to_stop_counts_from_the_next_step() -> None:
    model = net()
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()))
    reducer = runtime_of(model).reducer
    reducer.stop_asked = True
    assert not reducer.stop_agreed
    train(model, optimizer, 0)
    assert reducer.stop_agreed


class Normed(nn.Module):
    """Thirty layers of batch norm: ninety buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7)) for _ in range(30))
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("expanded", torch.zeros(1).expand(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@on_ranks(2)
def test_all_buffers_follow_rank_zero_in_one_message() -> None:
    model: nn.Module = Normed()
    for buffer in model.buffers():
        if buffer.is_floating_point() and 0 not in buffer.stride():
            buffer.fill_(dist.get_rank() + 0.5)
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=2)
    sent: list[int] = []
    broadcast = Fabric.broadcast
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Fabric, "broadcast", lambda self, tensor, **how: (sent.append(1), broadcast(self, tensor, **how))[1]
        )
        train(model, optimizer, 0)
    assert len(sent) == 1
    for name, value in weights(model).items():
        everybody = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(everybody, value.contiguous())
        assert torch.equal(*everybody), name


class Caching(Normed):
    """Has a table in a buffer that grows in forward. The table is longer on rank 0."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("a_table", torch.zeros(1), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.a_table = torch.full((9 - 2 * dist.get_rank(),), float(dist.get_rank()))
        return super().forward(x)


@on_ranks(2)
def test_a_cache_that_has_another_size_on_a_rank_is_left_to_it_and_the_others_follow() -> None:
    model: nn.Module = Caching(persistent=False)
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=2)
    for step in range(2):
        train(model, optimizer, step)
    assert model.a_table.tolist() == [float(dist.get_rank())] * (9 - 2 * dist.get_rank())
    statistics = torch.cat([value.float().flatten() for name, value in model.named_buffers() if "running" in name])
    everybody = [torch.empty_like(statistics) for _ in range(2)]
    dist.all_gather(everybody, statistics)
    assert torch.equal(*everybody)


@on_ranks(2)
def test_a_persistent_buffer_that_has_another_size_on_a_rank_is_named() -> None:
    model: nn.Module = Caching(persistent=True)
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=2)
    with pytest.raises(zeroshard.DisagreementError, match=r"buffer 'a_table' differs in size.*rank 1: \(\(7,\)"):
        train(model, optimizer, 0)
