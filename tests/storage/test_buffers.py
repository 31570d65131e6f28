"""Buffers that training writes: a step that is left out leaves no trace in them, after a load neither."""

from __future__ import annotations

import math
from contextlib import nullcontext
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


@pytest.mark.filterwarnings("ignore:step")
def test_what_is_written_to_buffers_between_two_steps_outlives_a_step_that_is_left_out() -> None:
    model, optimizer = averaged(in_place=True)
    model.register_buffer("scheduled", torch.zeros(1))
    train(model, optimizer)
    model.mean.fill_(7.0)
    model.scheduled = torch.ones(1)
    model.register_buffer("registered", torch.full((1,), 2.0))
    with torch.no_grad():  # is no training, and its writes are of no step
        model(torch.ones(2, 4))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert len(before) == 3
    train(model, optimizer, math.nan)
    assert optimizer.skipped_steps == 1
    after = dict(model.named_buffers())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.filterwarnings("ignore:step")
def test_a_step_of_two_forwards_leaves_nothing_of_either_and_dropped_gradients_begin_another() -> None:
    model, optimizer = averaged(in_place=True)
    train(model, optimizer)
    good = model.mean.clone()
    x = torch.full((2, 4), math.nan)
    (model(x).square().mean() + model(torch.ones(2, 4)).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.skipped_steps == 1
    assert torch.equal(model.mean, good)

    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.zero_grad()  # and no step
    model.mean.fill_(7.0)
    train(model, optimizer, math.nan)
    assert optimizer.skipped_steps == 2
    assert torch.equal(model.mean, torch.full((4,), 7.0))


class Cached(nn.Module):
    """Has a table that grows with the batch, as rotary embeddings have with the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.reaches = 0

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.reaches:
            self.reaches = len(x)
            self.register_buffer("table", torch.ones(self.reaches), persistent=False)
        return self.linear(x) * self.table[: len(x), None]


@pytest.mark.filterwarnings("ignore:step")
def test_a_cache_that_grew_in_a_step_that_was_left_out_is_used_in_the_next() -> None:
    model = Cached()
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), on_nonfinite="skip")
    for number, rows in enumerate((2, 5)):  # made by the bad step, and replaced by it
        for value in (math.nan, 1.0):
            model(torch.full((rows, 4), value)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.skipped_steps == number + 1


class Odd(nn.Module):
    """One buffer is a view whose elements share memory; two are deleted when told."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("one", torch.zeros(1))
        self.register_buffer("repeated", self.one.expand(4))
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.one.add_(1)
        if bool(x.isnan().any()):
            del self.kept, self.hidden
            self.hidden = "no buffer"
        return self.linear(x) + self.repeated


@pytest.mark.filterwarnings("ignore:step")
def test_buffers_that_repeat_one_element_and_deleted_ones_come_back_as_they_were() -> None:
    model = Odd()
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), on_nonfinite="skip")
    train(model, optimizer)
    train(model, optimizer, math.nan)
    assert optimizer.skipped_steps == 1
    assert float(model.one) == 1
    assert torch.equal(model.repeated, torch.ones(4))
    assert {"kept", "hidden"} <= dict(model.named_buffers()).keys()
    names = model.state_dict().keys()
    assert "kept" in names
    assert "hidden" not in names
    train(model, optimizer)


@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("policy", ["skip", "raise", "stop"])
def test_batch_norms_statistics_which_show_no_writes_are_as_before_a_bad_step(policy: Any) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), on_nonfinite=policy)
    for value in (1.0, 2.0):
        train(model, optimizer, value)
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
    good = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    norm.running_mean.data.add_(1.0)  # of the user, between two steps
    good["running_mean"] += 1.0
    with pytest.raises(zeroshard.NonFiniteError) if policy == "raise" else nullcontext():
        train(model, optimizer, math.nan)
    for name, buffer in norm.named_buffers():
        assert torch.equal(buffer, good[name]), name


@pytest.mark.filterwarnings("ignore:step")
def test_a_checkpoint_that_is_loaded_lifts_a_stop(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(4, 4)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), on_nonfinite="stop")
    train(model, optimizer)
    zeroshard.save(tmp_path / "good", model, optimizer)
    train(model, optimizer, math.nan)
    with pytest.raises(zeroshard.NonFiniteError, match="stopped"):
        train(model, optimizer)
    optimizer.zero_grad()
    zeroshard.load(tmp_path / "good", model, optimizer)
    train(model, optimizer)


@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("kind", ["sparse", "conjugate"])
def test_buffers_of_other_layouts_outlive_a_bad_step(kind: str) -> None:
    buffer = torch.eye(4).to_sparse() if kind == "sparse" else torch.ones(4, dtype=torch.complex64).conj()
    model: nn.Module = nn.Linear(4, 4)
    model.register_buffer("other", buffer)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), on_nonfinite="skip")
    train(model, optimizer)
    train(model, optimizer, math.nan)
    assert optimizer.skipped_steps == 1
    assert model.other is buffer
    assert torch.equal(
        model.other.to_dense(), torch.eye(4) if kind == "sparse" else torch.ones(4, dtype=torch.complex64)
    )
