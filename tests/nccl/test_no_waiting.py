"""The host does not wait for the device: no call of a step synchronises, or returns late because the device is busy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.nccl.processes import on_nccl, on_the_device
from tests.nccl.runs import STAGES, adamw, part, small, train

BUSY_SECONDS = 1.5
"""How long the device is busy. A step needs a small part of that on the host."""

pytestmark = on_the_device


def warmed_up(steps: int, **options: Any) -> tuple[nn.Module, Any, Tensor]:
    """A sharded model after some steps, its optimizer, and data on the device for one step more."""
    model = small()
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), **options)
    train(model, optimizer, steps=range(steps))
    data = part(steps, dist.get_rank())
    torch.cuda.synchronize()
    return model, optimizer, data


@contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("stage", STAGES)
@on_nccl(2)
def test_forward_backward_and_step_never_synchronise(stage: int) -> None:
    for clip in (None, 1.0):
        model, optimizer, data = warmed_up(2, stage=stage, clip_grad_norm=clip)
        for _ in range(2):
            with synchronisation_is_an_error():
                model(data).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


def keep_busy(seconds: float) -> torch.cuda.Event:
    """Starts a kernel that takes about so long. Returns the event of its end."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = 20_000_000
    start.record()
    torch.cuda._sleep(cycles)
    stop.record()
    torch.cuda.synchronize()
    dist.barrier()  # another rank that measures would share the device with this kernel
    end = torch.cuda.Event()
    torch.cuda._sleep(int(cycles * 1000 * seconds / start.elapsed_time(stop)))
    end.record()
    return end


@pytest.mark.parametrize("stage", STAGES)
@on_nccl(2)
def test_a_whole_step_returns_while_the_device_is_still_busy_with_what_came_before(stage: int) -> None:
    model, optimizer, data = warmed_up(3, stage=stage, clip_grad_norm=1.0)
    end = keep_busy(BUSY_SECONDS)
    late = []
    loss = model(data).square().mean()
    late.append(end.query())
    loss.backward()
    late.append(end.query())
    optimizer.step()
    late.append(end.query())
    optimizer.zero_grad()
    late.append(end.query())
    torch.cuda.synchronize()
    calls = ("forward", "backward", "step()", "zero_grad()")
    waited = [call for call, is_late in zip(calls, late, strict=True) if is_late][:1]
    assert not waited, f"{waited[0]} waited for the device"
