"""Whole parameters that were updated come back from all ranks: small units in one operation of the device."""

from __future__ import annotations

import pytest
import torch

import zeroshard
from tests.nccl.processes import on_nccl, on_the_device
from tests.nccl.runs import adamw, small, train
from zeroshard.comm import lane

pytestmark = on_the_device


def gathers_of_a_step(stage: int) -> int:
    """How many all-gathers the device makes in a step of five units."""
    model = small()
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage)
    train(model, optimizer, steps=range(2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train(model, optimizer, steps=range(2, 3))
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if "AllGather" in event.key)


@pytest.mark.parametrize("stage", [1, 2])
@on_nccl(2)
def test_small_units_are_gathered_together_after_an_update(stage: int) -> None:
    assert gathers_of_a_step(stage) == 1


@on_nccl(2)
def test_no_message_is_larger_than_its_bound_unless_one_unit_is() -> None:
    bound = lane.MESSAGE_BYTES
    lane.MESSAGE_BYTES = 1
    try:
        assert gathers_of_a_step(2) == 5
    finally:
        lane.MESSAGE_BYTES = bound
