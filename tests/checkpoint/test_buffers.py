"""Buffers that training writes: a step that is left out leaves no trace in them, after a load neither."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard


class Averaged(nn.Module):
    """Keeps a running mean, in place or by putting another tensor in its place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        new = self.mean * 0.9 + 0.1 * y.detach().mean(0)
        if self.in_place:
            self.mean.copy_(new)
        else:
            self.mean = new
        return y


def averaged(in_place: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Averaged(in_place)
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters()), on_nonfinite="skip")


def train(model: Any, optimizer: Any, value: float = 1.0) -> None:
    model(torch.full((2, 4), value)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("in_place", [True, False])
def test_a_step_that_is_left_out_does_not_enter_buffers_before_and_after_a_load(in_place: bool, tmp_path: Path) -> None:
    model, optimizer = averaged(in_place)
    for _ in range(3):
        train(model, optimizer)
    good = model.mean.clone()
    train(model, optimizer, math.nan)
    assert optimizer.skipped_steps == 1
    assert torch.equal(model.mean, good)
    zeroshard.save(tmp_path / "saved", model, optimizer)
    train(model, optimizer)
    assert torch.isfinite(model.mean).all()
    assert not torch.equal(model.mean, good)

    other, resumed = averaged(in_place)
    zeroshard.load(tmp_path / "saved", other, resumed)
    train(other, resumed, math.nan)
    assert torch.equal(other.mean, good)
    train(other, resumed)
    assert torch.equal(other.mean, model.mean)


class Lazy(nn.Module):
    """Makes its buffers when it first needs them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.seen is None:
            self.seen = y.detach().mean(0)
        if not hasattr(self, "first"):
            self.register_buffer("first", y.detach().sum(0))
        return y


@pytest.mark.filterwarnings("ignore:step")
def test_buffers_that_a_bad_step_made_are_gone_and_those_of_a_good_one_stay() -> None:
    torch.manual_seed(0)
    model = Lazy()
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), on_nonfinite="skip")
    train(model, optimizer, math.nan)
    assert model.seen is None
    assert not hasattr(model, "first")
    train(model, optimizer)
    good = model.seen.clone(), model.first.clone()
    train(model, optimizer, math.nan)
    assert optimizer.skipped_steps == 2
    assert torch.equal(model.seen, good[0])
    assert torch.equal(model.first, good[1])
