"""NaN and inf: found where they appear, and named. They never reach the states."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroshard
from tests.matrix import matrix
from tests.models import Block, batch
from tests.ranks import on_ranks
from zeroshard import LossScale, Offload, Precision


class Poison(torch.autograd.Function):
    """Passes a tensor on; its gradient becomes NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * math.nan


class Fragile(nn.Module):
    """Breaks in the middle block on one rank, in forward or in backward; has a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.blocks = nn.ModuleList(Block(9) for _ in range(3))
        self.last = nn.Linear(9, 5)
        self.register_buffer("mean", torch.zeros(5))
        self.breaks = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if self.breaks and number == 1 and dist.get_rank() == dist.get_world_size() - 1:
                x = x / 0 if self.breaks == "forward" else Poison.apply(x)
            x = block(x)
        x = self.last(x)
        self.mean.lerp_(x.detach().float().mean(0), 0.1)
        loss = x.float().square().mean()
        return loss + math.inf if self.breaks == "loss" else loss


def fragile(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = Fragile()
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)


def train(model: Any, optimizer: Any, step: int, breaks: str = "") -> None:
    model.breaks = breaks
    model(batch(step)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.breaks = ""


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    zeroshard.synchronize(model)
    return {**zeroshard.full_state_dict(model), **optimizer.state_dict()["state"]}


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    return bool(torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs)))


SETUPS: list[dict[str, Any]] = [
    *({"stage": stage} for stage in range(4)),
    {"stage": 3, "precision": "bf16", "clip_grad_norm": 1.0},
    {"stage": 2, "precision": "bf16", "offload": "cpu"},
    {"stage": 3, "precision": "bf16", "offload": Offload(split_master=True, delayed_update_after=0)},
]
WORDS = {
    "forward": "the output of unit 'blocks.1' is not finite on rank 1",
    "backward": r"the gradients of unit 'blocks.0' are not finite \(and of 1 that come after it in backward\)",
    "loss": r"the output of unit '\(root\)' is not finite on rank 0",
}


@matrix(setup=range(len(SETUPS)), breaks=WORDS)
@on_ranks(2)
def test_a_bad_step_is_named_and_never_enters_the_states(setup: int, breaks: str) -> None:
    options = SETUPS[setup]
    clean, optimizer = fragile(**options)
    for step in (0, 1):
        train(clean, optimizer, step)
    before_it = everything(clean, optimizer)
    train(clean, optimizer, 3)
    after_another = everything(clean, optimizer)
    for policy in ("skip", "raise", "stop") if options["stage"] == 2 else ("raise",):
        model, optimizer = fragile(**options, on_nonfinite=policy)
        for step in (0, 1):
            train(model, optimizer, step)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if policy == "raise":
                with pytest.raises(zeroshard.NonFiniteError, match=f"step 3: {WORDS[breaks]}"):
                    train(model, optimizer, 2, breaks)
            else:
                train(model, optimizer, 2, breaks)
        model.breaks = ""
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name]), f"{name}: {options}"
        assert same(everything(model, optimizer), before_it), f"{policy}, {options}"
        stats = zeroshard.stats(model)
        assert stats.skipped_steps == 1
        if policy == "stop":
            assert stats.stop_reason is not None
            with pytest.raises(zeroshard.NonFiniteError, match="training was stopped: step 3"):
                train(model, optimizer, 3)
            continue
        assert stats.stop_reason is None
        if policy == "skip" and dist.get_rank() == 0:
            assert any("the step was left out" in str(warning.message) for warning in told)
        train(model, optimizer, 3)
        assert same(everything(model, optimizer), after_another), f"{policy}, {options}"


@on_ranks(2)
def test_an_fp16_overflow_lowers_the_loss_scale_and_is_no_fault_until_it_cannot_be_lowered() -> None:
    precision = Precision(parameters=torch.float16, loss_scale=LossScale(initial=2.0, minimum=1.0))
    model, optimizer = fragile(stage=2, precision=precision, on_nonfinite="raise")
    train(model, optimizer, 0, "backward")
    assert zeroshard.stats(model).loss_scale == 1.0
    with pytest.raises(zeroshard.NonFiniteError, match="the gradients of unit"):
        train(model, optimizer, 1, "backward")
    train(model, optimizer, 2)


@on_ranks(1)
def test_a_loss_that_was_dropped_is_not_held_against_the_next_step() -> None:
    model, optimizer = fragile(stage=2, on_nonfinite="raise")
    train(model, optimizer, 0)
    model.breaks = "forward"
    assert not math.isfinite(float(model(batch(1))))
    model.breaks = ""
    train(model, optimizer, 2)


@on_ranks(2)
def test_units_whose_outputs_are_dtensors_are_looked_at_too() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(7, 6), nn.Linear(6, 4))
    plan = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zeroshard.shard(model, optimizer, stage=2, units=["0", "1"], on_nonfinite="raise")
    model(batch(0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(batch(0) * math.inf).sum().backward()
    with pytest.raises(zeroshard.NonFiniteError, match="the output of unit '0' is not finite"):
        optimizer.step()


def test_the_option_is_checked_early() -> None:
    with pytest.raises(ValueError, match='must be "skip", "stop", "raise"'):
        fragile(on_nonfinite="ignore")
    with pytest.raises(ValueError, match="update_in_backward"):
        fragile(on_nonfinite="skip", stage=2, precision="bf16", offload=Offload(update_in_backward=True))
