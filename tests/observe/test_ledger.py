"""DESIGN, invariant 3: model states are the papers' formulas, checked against the process's live storages."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.models import loss_of, net
from tests.ranks import on_ranks
from tests.storages import live_bytes
from tests.training import train
from zeroshard.comm.lane import Pending
from zeroshard.runtime import runtime_of

WIDE = {"width": 96, "depth": 4}


def live_bytes_down_to(expected: float) -> int:
    """Live bytes, asked again while there are more: the thread of a finished collective may let go a moment later."""
    latest = time.monotonic() + 5
    while (found := live_bytes()) > expected > 0 and time.monotonic() < latest:
        time.sleep(0.05)
    return found


def formula(stage: int, psi: int, world: int, width: int, states: int) -> float:
    """PAPERS section 1 with ``width`` bytes a parameter and gradient and ``states`` bytes of optimizer states."""
    return (
        width * psi / (world if stage >= 3 else 1)
        + width * psi / (world if stage >= 2 else 1)
        + states * psi / (world if stage >= 1 else 1)
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@on_ranks(2)
def test_model_states_between_backward_and_step_are_the_formula_within_one_percent(stage: int, precision: str) -> None:
    model = net(**WIDE)
    psi = sum(p.numel() for p in model.parameters())
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=stage, precision=precision)
    for number in range(3):
        train(model, optimizer, number)
    stats = zeroshard.stats(model)
    assert stats.memory_at_step is not None
    width, states = {"bf16": (2, 12), "fp32": (4, 8)}[precision]
    expected = formula(stage, psi, 2, width, states)
    assert stats.memory_at_step.model_states == pytest.approx(expected, rel=0.01)
    assert stats.memory_at_step.accumulators == stats.memory_at_step.gathered == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_the_ledger_is_what_the_garbage_collector_finds(stage: int) -> None:
    before = live_bytes()
    model = net(**WIDE)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=stage, precision="bf16")

    def compare() -> None:
        ledger = zeroshard.stats(model).memory.total
        found = live_bytes_down_to(before + 1.01 * ledger) - before
        assert found == pytest.approx(ledger, rel=0.01), f"stage {stage}: ledger {ledger}, found {found}"

    compare()
    for number in range(2):
        loss = loss_of(model, number)
        loss.backward()
        del loss
        compare()
        optimizer.step()
        zeroshard.synchronize(model)
        compare()
        optimizer.zero_grad()
    with zeroshard.gathered(model):
        compare()
    compare()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_nothing_grows_after_the_second_step(stage: int) -> None:
    model = net(**WIDE)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=stage, precision="bf16")
    sizes: list[int] = []
    for number in range(5):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        zeroshard.synchronize(model)
        sizes.append(live_bytes_down_to(min(sizes, default=0)))
    assert len(set(sizes[1:])) == 1, sizes


@on_ranks(2)
def test_accumulators_exist_only_while_more_than_one_micro_batch_accumulates() -> None:
    for stage in (0, 1, 2, 3):
        model = net(**WIDE)
        model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=stage, precision="bf16")
        psi = zeroshard.stats(model).padded_parameters
        loss_of(model, 0).backward()
        assert zeroshard.stats(model).memory.accumulators == 0
        loss_of(model, 1).backward()
        optimizer.clip_grad_norm_(1.0)  # settles reduces under way
        assert zeroshard.stats(model).memory.accumulators == 4 * psi / (1 if stage == 0 else 2)
        optimizer.step()
        assert zeroshard.stats(model).memory.accumulators == 0


@on_ranks(2)
def test_stage_2_frees_each_units_gradient_as_soon_as_it_is_reduced() -> None:
    """While the first block's backward runs, the later blocks' gradients are shards already."""
    model: Any = net(width=96, depth=8)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
    peak = 0

    class Probe(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.requires_grad:
                x.register_hook(lambda _: note())
            return x

    def note() -> None:
        nonlocal peak
        peak = max(peak, zeroshard.stats(model).memory.gradients)

    probe = Probe()
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: probe(output))
    loss_of(model, 0).backward()
    optimizer.step()
    stats = zeroshard.stats(model)
    block_bytes = 4 * stats.padded_parameters / 8
    shards = 4 * stats.padded_parameters / 2
    assert 0 < peak <= shards + 3.2 * block_bytes < 4 * stats.padded_parameters


@on_ranks(2)
def test_zero_grad_gives_the_gradients_memory_back_before_the_next_forward_computes() -> None:
    model = net(**WIDE)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
    loss_of(model, 0).backward()
    optimizer.zero_grad()
    during = []
    model.blocks[0].register_forward_hook(lambda *_: during.append(zeroshard.stats(model).memory.gradients))
    loss_of(model, 1)
    assert during == [0]


@on_ranks(2)
def test_fused_buffers_are_bounded_by_max_unit_bytes() -> None:
    """C_B: a model without repeated blocks still reduces and gathers in pieces of bounded size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 32))
    bound = 64 * 64 * 4 + 1024
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=2, max_unit_bytes=bound)
    sizes: list[int] = []
    reduces = runtime_of(model).fabric.reduces
    reduce_scatter = reduces.reduce_scatter

    def spy(whole: torch.Tensor, shard: torch.Tensor, label: str) -> Pending:
        sizes.extend([whole.nbytes, shard.nbytes])
        return reduce_scatter(whole, shard, label)

    reduces.reduce_scatter = spy  # type: ignore[method-assign]
    model(torch.randn(3, 64)).sum().backward()
    optimizer.step()
    assert 64 * 64 * 4 <= max(sizes) <= bound, "the whole flats are among them, and none is larger"
    assert len(sizes) > 2


def test_states_that_come_late_are_in_the_memory_of_a_step() -> None:
    model = net()
    model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = optimizer.state_dict()
    (group,) = state["param_groups"]
    group["momentum"] = 0.9
    state["state"] = {number: {"momentum_buffer": None} for number in group["params"]}
    optimizer.load_state_dict(state)
    for number in range(3):
        train(model, optimizer, number)
    stats = zeroshard.stats(model)
    assert stats.memory_at_step is not None
    assert stats.memory_at_step.optimizer_states == stats.memory.optimizer_states > 0
