"""Parameters that a step does not use, on all ranks or on some, are treated as DistributedDataParallel treats them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.matrix import Stages, in_stages
from tests.models import Block, batch
from tests.ranks import on_ranks

STAGES = (0, 1, 2, 3)


class Choosy(nn.Module):
    """Blocks with two branches each. Which branch runs depends on the step, and on the rank if asked."""

    class Fork(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.left, self.right, self.never = Block(width), Block(width), nn.Linear(width, width)

        def forward(self, x: Tensor, left: bool) -> Tensor:
            return self.left(x) if left else self.right(x)

    def __init__(self, by_rank: bool) -> None:
        super().__init__()
        self.by_rank = by_rank
        self.first = nn.Linear(7, 9)
        self.unused = nn.Linear(4, 4)
        self.forks = nn.ModuleList(self.Fork(9) for _ in range(3))

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.first(x)
        for number, fork in enumerate(self.forks):
            x = fork(x, (step + number + (dist.get_rank() if self.by_rank else 0)) % 2 == 0)
        return x


def choosy(by_rank: bool) -> Choosy:
    torch.manual_seed(2)
    return Choosy(by_rank)


@in_stages
@pytest.mark.parametrize("by_rank", [False, True])
@on_ranks(2)
def test_unused_parameters_are_skipped_or_get_zeros_bitwise_as_in_ddp(stages: Stages, by_rank: bool) -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)

    plain = choosy(by_rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    optimizer = optimizer_of(plain)
    for step in range(5):
        ddp(batch(step), step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = plain.state_dict()
    assert torch.equal(expected["unused.weight"], choosy(by_rank).unused.weight), "weight decay would move it"

    for stage in stages:
        model = choosy(by_rank)
        model, sharded = zeroshard.shard(model, optimizer_of(model), stage=stage)
        for step in range(5):
            model(batch(step), step).square().mean().backward()
            sharded.step()
            sharded.zero_grad()
        for name, value in zeroshard.full_state_dict(model).items():
            assert torch.equal(value, expected[name]), f"stage {stage}: {name}"


@in_stages
@on_ranks(2)
def test_a_unit_that_is_never_called_holds_up_nothing(stages: Stages) -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(7) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[3](self.blocks[0](x))

    for stage in stages:
        torch.manual_seed(0)
        model = Skipping()
        start = {name: value.clone() for name, value in model.state_dict().items()}
        model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), weight_decay=0.5), stage=stage)
        for step in range(3):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        end = zeroshard.full_state_dict(model)
        for name in start:
            assert torch.equal(start[name], end[name]) == ("blocks.1." in name or "blocks.2." in name), name


@in_stages
@on_ranks(2)
def test_each_of_several_losses_may_touch_other_units(stages: Stages) -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(7) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            shared = self.blocks[0](x)
            return self.blocks[1](shared), self.blocks[2](shared)

    def train(model: Any, module: Any, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            one, two = model(batch(step))
            if isinstance(model, DistributedDataParallel):
                (one.square().mean() + two.abs().mean()).backward()
            else:
                one.square().mean().backward(retain_graph=True)
                two.abs().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    plain = TwoHeads()
    train(DistributedDataParallel(plain), plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for stage in stages:
        torch.manual_seed(0)
        model = TwoHeads()
        model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
        train(model, model, optimizer)
        for name, value in zeroshard.full_state_dict(model).items():
            torch.testing.assert_close(value, plain.state_dict()[name])
