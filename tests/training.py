"""Training in a few words, with zeroshard and without, for tests that look at what surrounds it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.models import Net, loss_of, net
from zeroshard.shown.absent import source_of
from zeroshard.states.flat import Presence

STAGES = (0, 1, 2, 3)
SHARDED_GRADIENTS = (1, 2, 3)
"""Stages in which ``p.grad`` is a placeholder on two ranks."""
INNER = "blocks.0.up.weight"
"""A parameter that stage 3 releases as soon as it can."""

Make = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def shard(make: Make = sgd, **options: Any) -> tuple[Net, zeroshard.ShardedOptimizer]:
    model = net(depth=2)
    return zeroshard.shard(model, make(model.parameters()), **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained_plainly(steps: int, make: Make = sgd) -> Net:
    model = net(depth=2)
    ddp = DistributedDataParallel(model)
    optimizer = make(model.parameters())
    for step in range(steps):
        train(ddp, optimizer, step)
    return model


def trained_plainly_from(state: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    plain = net(depth=2)
    plain.load_state_dict(state)
    train(DistributedDataParallel(plain), sgd(plain.parameters()), step)
    return dict(plain.state_dict())


def another_state() -> dict[str, Tensor]:
    torch.manual_seed(77)
    return {name: torch.randn(value.shape) for name, value in net(depth=2).state_dict().items()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return zeroshard.full_state_dict(model)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, f"differ: {different}"


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-7)


def assert_nobody_noticed(model: nn.Module, optimizer: torch.optim.Optimizer, expected: dict[str, Tensor]) -> None:
    """The ranks are together, the weights are as expected, and another step works."""
    assert_same(weights(model), expected)
    train(model, optimizer, 9)
    assert all(bool(torch.isfinite(value).all()) for value in weights(model).values())


def is_released(parameter: nn.Parameter) -> bool:
    """Whether this rank has only its shard of a parameter."""
    flat = source_of(parameter)
    return flat is not None and flat.presence is Presence.RELEASED


@contextmanager
def refused(what: str, match: str = "") -> Iterator[None]:
    """The block raises, in one of its statements, and the message says what it should."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
    else:
        pytest.fail(f"not refused: {what}")
    assert re.search(match, text), f"{what}: {match!r} is not in {text!r}"


class Scaled(nn.Module):
    """A parameter of one element, as a learnt temperature is: torch finds no overlap in its placeholder."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.offset = nn.Parameter(torch.tensor([0.5]))
        self.layer = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale + self.offset
