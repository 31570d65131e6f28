"""Running out of a GPU's memory for real, in forward, backward and step, in a plain loop."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import zeroshard

WIDTH = 4096
DEPTH = 8


@pytest.fixture(autouse=True)
def everything_is_given_back() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def no_more_than(room: int) -> Iterator[None]:
    """Inside, torch may take so many bytes more than it has now."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + room) / whole))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


class Hungry(torch.autograd.Function):
    """Takes nothing in forward and a gigabyte in backward, inside torch's engine."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        return gradients[0]


def wide() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=0, precision="bf16", device="cuda")


def inputs(rows: int) -> Tensor:
    return torch.ones(rows, WIDTH, device="cuda", dtype=torch.bfloat16)


def test_in_forward_the_exception_has_a_note() -> None:
    model, optimizer = wide()
    model(inputs(16)).float().sum().backward()
    optimizer.step()
    many = inputs(1 << 14)
    with no_more_than(64 << 20), pytest.raises(torch.OutOfMemoryError) as caught:
        model(many)
    (told,) = caught.value.__notes__
    assert "what held the memory of rank 0, in stage 0" in told
    assert "all else that torch had allocated" in told
    assert "offload=" in told  # one rank has nothing to divide, but a host


def test_in_backward_it_is_written_above_the_error(capfd: pytest.CaptureFixture[str]) -> None:
    model, _ = wide()
    loss = Hungry.apply(model(inputs(16)).float()).sum()
    with no_more_than(128 << 20), pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    assert "zeroshard: what held the memory of rank 0, in stage 0" in capfd.readouterr().err


def test_in_the_step_the_exception_has_a_note() -> None:
    model, optimizer = wide()
    model(inputs(16)).float().sum().backward()  # the first step makes the moments, 8 bytes a parameter
    with no_more_than(64 << 20), pytest.raises(torch.OutOfMemoryError) as caught:
        optimizer.step()
    (told,) = caught.value.__notes__
    assert "what held the memory of rank 0" in told
