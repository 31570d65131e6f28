"""Small training runs on the ranks' device: with DDP, by one rank alone on everybody's data, and with zeroshard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.loops.harness import Log
from tests.models import Net, net
from tests.nccl.processes import device

STAGES = (0, 1, 2, 3)
STEPS = 4
CLOSE = 1e-5
"""Relative distance where ranks add gradients in another order, or the host updates."""

Build = Callable[[], nn.Module]
Make = Callable[[Any], torch.optim.Optimizer]
Loss = Callable[[nn.Module, int, int], Tensor]
"""The loss of a model in a step, on one part of the data."""


def small() -> Net:
    """Five units: a root and four blocks."""
    return net().to(device())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, foreach=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Adam turns a rounding error in a gradient near zero into a step of full length. This optimizer does not."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def part(step: int, index: int, rows: int = 6) -> Tensor:
    """The part of a step's data that one data-parallel rank sees."""
    return torch.randn(rows, 7, generator=torch.Generator().manual_seed(1000 * step + index)).to(device())


def loss_of(model: nn.Module, step: int, index: int) -> Tensor:
    return model(part(step, index)).float().square().mean()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    index: int | None = None,
    *,
    loss: Loss = loss_of,
    steps: Sequence[int] = range(STEPS),
) -> list[float]:
    """The ordinary loop, on part ``index`` of the data: by default that of this rank. Returns the losses."""
    losses = []
    for step in steps:
        value = loss(model, step, dist.get_rank() if index is None else index)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Of a model that is not sharded."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def trained_with_ddp(
    build: Build = small, make: Make = adamw, loss: Loss = loss_of, *, unused: bool = False, steps: int = STEPS
) -> Log:
    """``unused``: some parameters get no gradient."""
    model = build()
    ddp = DistributedDataParallel(model, find_unused_parameters=unused)
    losses = train(ddp, make(model.parameters()), loss=loss, steps=range(steps))
    return {"losses": losses, "weights": weights(model)}


def trained_alone(
    parts: int, index: int, build: Build = small, make: Make = momentum, *, steps: int = STEPS, rows: int = 6
) -> Log:
    """Plain torch on all parts of the data. The losses are those of part ``index``."""
    model = build()
    optimizer = make(model.parameters())
    losses = []
    for step in range(steps):
        for each in range(parts):
            loss = model(part(step, each, rows)).float().square().mean()
            (loss / parts).backward()
            if each == index:
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "weights": weights(model)}


def trained(
    build: Build = small,
    make: Make = adamw,
    loss: Loss = loss_of,
    *,
    index: int | None = None,
    steps: int = STEPS,
    **options: Any,
) -> Log:
    """With zeroshard. ``options`` are those of ``shard()``."""
    model = build()
    model, optimizer = zeroshard.shard(model, make(model.parameters()), **options)
    losses = train(model, optimizer, index, loss=loss, steps=range(steps))
    zeroshard.synchronize(model)  # publishes a delayed update
    return {"losses": losses, "weights": zeroshard.full_state_dict(model)}
