"""Options that the tests of offload share, and a small sharded model to try them on."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import zeroshard
from tests.models import loss_of
from tests.offload.scenarios import (
    adamw,
    small,
)
from zeroshard import Offload

STAGES = (0, 1, 2, 3)
SPLIT = Offload(split_master=True)
READ_BACK = Offload(split_master=True, read_back=True)
IN_BACKWARD = Offload(update_in_backward=True)
ON_HOST = Offload(parameters="cpu")
DELAYED = Offload(delayed_update_after=1)
BF16 = {"precision": "bf16"}


def sharded(offload: Offload | str | None = "cpu", make: Any = adamw, **options: Any) -> tuple[Any, Any]:
    model = small()
    return zeroshard.shard(model, make(model), offload=offload, **options)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def masters(optimizer: Any) -> dict[str, Tensor]:
    return {str(number): state["master"] for number, state in sorted(optimizer.state_dict()["state"].items())}
