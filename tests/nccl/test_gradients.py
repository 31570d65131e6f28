"""Gradients that do not come for every parameter in every backward: unused, frozen, accumulated."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.loops.harness import Log, assert_equal
from tests.models import Around
from tests.nccl.processes import device, on_nccl
from tests.nccl.runs import CLOSE, STAGES, adamw, loss_of, momentum, part, small, trained, trained_with_ddp, weights
from tests.schedule.test_unused import choosy
from zeroshard.system import machine

WIDTH = 13
MICRO_BATCHES = 3


@on_nccl(2)
def test_parameters_that_some_ranks_or_none_use_are_treated_bitwise_as_in_ddp() -> None:
    def build() -> nn.Module:
        return choosy(by_rank=True).to(device())

    def loss(model: nn.Module, step: int, index: int) -> Tensor:
        value: Tensor = model(part(step, index), step).square().mean()
        return value

    expected = trained_with_ddp(build, adamw, loss, unused=True)
    for stage in STAGES:
        assert_equal(trained(build, adamw, loss, stage=stage), expected, 0.0, f"stage {stage}")


class Adapted(nn.Module):
    """A frozen 16-bit matrix with an adapter of low rank in fp32, as LoRA has."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x.bfloat16()).float() + self.up(self.down(x)))


def adapted() -> nn.Module:
    torch.manual_seed(1)
    model = Around(Adapted)
    model.first.requires_grad_(False)
    return model.to(device())


@on_nccl(2)
def test_adapters_on_a_frozen_base_train_bitwise_as_under_ddp_and_with_offload_within_rounding() -> None:
    machine.ensure_bf16_matmul()  # in a rehearsal DDP comes first
    expected = trained_with_ddp(adapted)
    for stage in STAGES:
        assert_equal(trained(adapted, stage=stage), expected, 0.0, f"stage {stage}")
    assert_equal(trained(adapted, stage=2, offload="cpu"), expected, CLOSE, "offload")


def accumulate(model: Any, optimizer: torch.optim.Optimizer, index: int) -> None:
    """The first step reduces every micro-batch, the second only the last one."""
    for step in range(2):
        for micro in range(MICRO_BATCHES):
            with model.no_sync() if step and micro < MICRO_BATCHES - 1 else nullcontext():
                (loss_of(model, 10 * step + micro, index) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_nccl(2)
def test_micro_batches_add_up_as_under_ddp_with_and_without_no_sync() -> None:
    index = torch.distributed.get_rank()
    plain = small()
    ddp = DistributedDataParallel(plain)
    accumulate(ddp, momentum(plain.parameters()), index)
    expected: Log = weights(plain)
    for stage, offload in (*((stage, None) for stage in STAGES), (2, "cpu")):
        model = small()
        model, optimizer = zeroshard.shard(model, momentum(model.parameters()), stage=stage, offload=offload)
        accumulate(model, optimizer, index)
        assert_equal(zeroshard.full_state_dict(model), expected, CLOSE, f"stage {stage}, offload {offload}")
