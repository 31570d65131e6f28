"""Whole states of divided models: saved on two ranks and loaded on four and on one, read and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zeroshard
from tests.loops.harness import assert_equal
from tests.nccl.processes import on_nccl, pool
from tests.nccl.runs import CLOSE, loss_of, momentum, part, small, trained_alone, weights

ROWS = 8
INNER = "blocks.0.up.weight"


# -- checkpoints ------------------------------------------------------------------------------------------------------


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With an ``eps`` above the rounding errors of gradients, so that no number of ranks changes a step's direction."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5, foreach=True)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The ranks divide one batch, so that training is the same on any number of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in steps:
        model(part(step, 0, ROWS)[rank::world]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def begin(folder: str) -> None:
    model = small()
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=3)
    train(model, optimizer, range(3))
    zeroshard.save(folder, model, optimizer)


def go_on(folder: str, stage: int, offload: str | None) -> None:
    model = small()
    with torch.no_grad():
        model.first.weight.zero_()
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage, offload=offload)
    zeroshard.load(folder, model, optimizer)
    for steps in (3, 6):
        train(model, optimizer, range(3, steps))
        expected = trained_alone(1, 0, make=adamw, steps=steps, rows=ROWS)
        assert_equal(zeroshard.full_state_dict(model), expected["weights"], CLOSE, f"after {steps} steps")


def test_a_checkpoint_of_two_ranks_goes_on_on_four_and_on_one(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    pool().run(begin, 2, {"folder": folder})
    pool().run(go_on, 4, {"folder": folder, "stage": 2, "offload": "cpu"})
    pool().run(go_on, 4, {"folder": folder, "stage": 3, "offload": None})
    pool().run(go_on, 1, {"folder": folder, "stage": 0, "offload": None})


# -- whole parameters -------------------------------------------------------------------------------------------------


@on_nccl(2)
def test_what_rank_zero_writes_inside_gathered_reaches_every_rank_and_survives_a_step() -> None:
    plain = small()
    optimizer = momentum(plain.parameters())
    after = []
    for step in range(2):
        for index in range(2):
            (loss_of(plain, step, index) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            with torch.no_grad():
                plain.get_parameter(INNER).mul_(-2)
        after.append(weights(plain))
    for stage, offload in ((1, None), (3, None), (2, "cpu")):
        model = small()
        model, sharded = zeroshard.shard(model, momentum(model.parameters()), stage=stage, offload=offload)
        for step in range(2):
            loss_of(model, step, dist.get_rank()).backward()
            sharded.step()
            sharded.zero_grad()
            if step == 0:
                with zeroshard.gathered(model, write=True), torch.no_grad():
                    if dist.get_rank() == 0:
                        model.get_parameter(INNER).mul_(-2)
            assert_equal(zeroshard.full_state_dict(model), after[step], CLOSE, f"stage {stage}, step {step}")


@on_nccl(2)
def test_every_way_to_read_whole_parameters_gives_the_same_bits() -> None:
    for stage, offload in ((2, None), (3, "cpu")):
        model = small()
        model, optimizer = zeroshard.shard(model, momentum(model.parameters()), stage=stage, offload=offload)
        train(model, optimizer, range(2))
        whole = zeroshard.full_state_dict(model)
        with zeroshard.gathered(model):
            assert_equal(weights(model), whole, 0.0, f"stage {stage}, inside gathered")
        assert_equal({INNER: model.get_parameter(INNER).detach()}, {INNER: whole[INNER]}, 0.0, f"stage {stage}, read")
        of_rank_one = zeroshard.full_state_dict(model, rank=1)
        assert_equal(of_rank_one, whole if dist.get_rank() == 1 else {}, 0.0, f"stage {stage}, of rank 1")
        gathered = [whole, None]
        dist.broadcast_object_list(gathered)
        assert_equal(whole, gathered[0], 0.0, f"stage {stage}, another rank")
