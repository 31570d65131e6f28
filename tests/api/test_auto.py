"""``stage="auto"`` takes the lowest stage that fits, the same on all ranks, and says why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeroshard
from tests.models import loss_of, net
from tests.ranks import on_ranks
from zeroshard.config.options import Config
from zeroshard.plan.foresee import Foresight
from zeroshard.plan.memory.device_memory import DeviceMemory
from zeroshard.plan.room import room_of
from zeroshard.system import machine


def foreseen_states(model: nn.Module, optimizer: torch.optim.Optimizer | None, precision: str) -> DeviceMemory:
    """What ``shard()`` expects between backward and step."""
    config = Config(stage=0, precision=precision)  # type: ignore[arg-type]
    foreseen = Foresight(model, optimizer, config, 1, room_of(model, torch.device("cpu")))
    return foreseen.row(0, foreseen.fitting()[0].variant).budget.at_step


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "RMSprop", "Adagrad", "Adamax"])
def test_foreseen_states_are_those_that_a_run_has(optimizer: str, precision: str) -> None:
    model = net(width=64)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    foreseen = foreseen_states(model, made, precision)
    model, sharded = zeroshard.shard(model, made, precision=precision)
    for step in range(2):
        loss_of(model, step).backward()
        sharded.step()
    memory = zeroshard.stats(model).memory_at_step
    assert memory is not None
    assert memory.parameters == pytest.approx(foreseen.parameters, rel=0.03)  # small tensors carry padding
    assert memory.gradients == pytest.approx(foreseen.gradients, rel=0.03)
    assert memory.optimizer_states == pytest.approx(foreseen.optimizer_states, rel=0.03, abs=1)


def test_frozen_parameters_are_foreseen_without_gradients_and_states() -> None:
    model = nn.Linear(64, 64, bias=False).requires_grad_(False)
    foreseen = foreseen_states(model, None, "bf16")
    assert (foreseen.parameters, foreseen.gradients, foreseen.optimizer_states) == (2 * 64 * 64, 0, 0)


@on_ranks(2)
def test_ranks_with_different_memory_choose_one_stage_and_train() -> None:
    rank = torch.distributed.get_rank()
    psi = sum(p.numel() for p in net(width=64, depth=12).parameters())  # wide enough that padding is little
    original = machine.usable_memory
    for room, stage in ((100, 0), (20, 1), (16, 2), (12, 3)):
        # Rank 1 has less; LOCAL_WORLD_SIZE is not set, so the world shares the machine.
        machine.usable_memory = lambda room=room: 2 * psi * (room if rank else 1000)  # type: ignore[misc]
        try:
            model = net(width=64, depth=12)  # stage 3 has three of its units whole
            model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage="auto")
        finally:
            machine.usable_memory = original
        assert zeroshard.stats(model).stage == stage, room
        loss_of(model, 0).backward()
        optimizer.step()


@on_ranks(2)
def test_where_one_rank_has_no_room_for_states_all_ranks_refuse() -> None:
    model, original = net(width=64, depth=12), machine.usable_memory
    psi = sum(p.numel() for p in model.parameters())
    machine.usable_memory = lambda: 2 * psi * (7 if torch.distributed.get_rank() else 1000)  # states take 8 in stage 3
    try:
        with pytest.raises(ValueError, match=r"nothing that \"auto\" may choose fits here\. Nearest comes stage 3"):
            zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage="auto")
    finally:
        machine.usable_memory = original
    zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage="auto")  # nothing was taken


def test_the_choice_is_printed_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage="auto")
    said = capsys.readouterr().out
    assert "stage 0 chosen, the lowest that fits" in said
    assert "stage 3:" in said


def test_options_of_stage_3_are_refused_with_auto() -> None:
    model = net()
    with pytest.raises(ValueError, match=r"keep=.*'auto'.*use stage=3"):
        zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage="auto", keep=())
