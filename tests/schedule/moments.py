"""A sharded model at one moment of a training step."""

from __future__ import annotations

from typing import Any

import torch

import zeroshard
from tests.models import Net, batch, loss_of
from tests.training import shard

MOMENTS = ("shard", "evaluation", "forward", "backward", "step")


def at_moment(moment: str, stage: int, **options: Any) -> tuple[Net, zeroshard.ShardedOptimizer, Any]:
    """The model, the optimizer, and the loss if there is one."""
    model, optimizer = shard(stage=stage, **options)
    loss = None
    if moment == "evaluation":
        with torch.no_grad():
            model(batch(0))
    elif moment != "shard":
        loss = loss_of(model, 0)
    if moment in ("backward", "step"):
        assert loss is not None
        loss.backward()
    if moment == "step":
        optimizer.step()
    return model, optimizer, loss
