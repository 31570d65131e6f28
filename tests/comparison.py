"""One sentence for most of what "works unchanged" means: a model trains in every stage as under DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.training import STAGES, Make, adamw

Model = TypeVar("Model", bound=nn.Module)
Loss = Callable[[Any, int], Tensor]
"""The loss of a model, wrapped or not, in a step."""


def trained_with_ddp(
    build: Callable[[], nn.Module], loss: Loss, *, steps: int = 3, make: Make = adamw, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final state of plain torch."""
    torch.manual_seed(1)
    model = build()
    wrapped = DistributedDataParallel(model, **({"find_unused_parameters": True} | options))
    losses = run(wrapped, make(model.parameters()), loss, steps)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    assert all(bool(value.isfinite().all()) for value in state.values())
    return losses, state


def assert_trains_as_ddp(
    build: Callable[[], nn.Module],
    loss: Loss,
    *,
    steps: int = 3,
    make: Make = adamw,
    exact: bool = True,
    ddp: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Losses, parameters and buffers are those of DDP in every stage; bit by bit, unless ``exact`` says otherwise."""
    losses, state = trained_with_ddp(build, loss, steps=steps, make=make, **(ddp or {}))
    for stage in STAGES:
        torch.manual_seed(1)
        model = build()
        model, optimizer = zeroshard.shard(model, make(model.parameters()), stage=stage, **options)
        ours = run(model, optimizer, loss, steps)
        assert_equal_states(zeroshard.full_state_dict(model), state, f"stage {stage}", exact)
        if exact:
            assert ours == losses, f"stage {stage}"
        else:
            torch.testing.assert_close(ours, losses, msg=f"stage {stage}: {ours} {losses}")


def run(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, steps: int) -> list[float]:
    """The ordinary loop. Dropout draws other numbers on every rank, the same whatever wraps the model."""
    torch.manual_seed(100 + dist.get_rank())
    losses = []
    for step in range(steps):
        value = loss(model, step)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def assert_equal_states(ours: dict[str, Tensor], theirs: dict[str, Tensor], where: str, exact: bool = True) -> None:
    assert ours.keys() == theirs.keys(), where
    if exact:
        different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
        assert not different, f"{where}: {different} differ"
    else:
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], msg=lambda text, name=name: f"{where}: {name}: {text}")
