"""What the thread that drives a device needs for each unit, measured through the runtime itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .. import compat
from ..api import shard, synchronize
from ..offload.options import Offload
from ..train.gpt import GPT, ModelConfig

DEPTHS = (4, 16)
"""Blocks of the models that are timed; the difference is that of so many blocks."""
STEPS = 24


def launch_seconds(device: torch.device) -> dict[str, float]:
    """What it takes to launch a unit: the runtime on models with next to nothing to compute, of two depths."""
    alone = _launches(device)
    checkpointed = _launches(device, checkpointing=True)
    offloaded = _launches(device, offload="cpu")
    beside = _launches(device, offload=Offload(update_in_backward=True))
    found = {
        "launch.forward": alone.forward,
        "launch.backward": alone.backward,
        "launch.recompute": checkpointed.total - alone.total,
        "launch.offload": offloaded.whole - alone.total,
        "launch.beside": beside.whole - alone.total,
        "launch.update": alone.update,
        "launch.step": alone.fixed_update,
    }
    if not dist.is_initialized():  # or the ranks that there are would be asked
        with compat.one_rank_of(8, 0):
            divided = _launches(device, stage=3)
        found["launch.communicate"] = (divided.total - alone.total) / 3  # two gathers and a reduce
    return {key: max(0.0, value) for key, value in found.items()}


class _Launches(NamedTuple):
    """Seconds of the driving thread for one unit, and what a step takes whatever it has."""

    forward: float
    backward: float
    update: float
    fixed_update: float

    @property
    def total(self) -> float:
        return self.forward + self.backward

    @property
    def whole(self) -> float:
        return self.total + self.update


def _launches(device: torch.device, *, checkpointing: bool = False, **options: Any) -> _Launches:
    shallow, deep = (_phases(device, layers, checkpointing, options) for layers in DEPTHS)
    more = DEPTHS[1] - DEPTHS[0]
    forward, backward, update = ((late - early) / more for early, late in zip(shallow, deep, strict=True))
    return _Launches(forward, backward, update, max(0.0, shallow[2] - DEPTHS[0] * update))


def _phases(device: torch.device, layers: int, checkpointing: bool, options: dict[str, Any]) -> tuple[float, ...]:
    """Of forward, backward and update, each as it usually is: a thread is seldom as quick as at its quickest."""
    config = ModelConfig(layers=layers, hidden=64, heads=1, sequence=16, vocabulary=64, checkpointing=checkpointing)
    with torch.device("meta"):
        model: nn.Module = GPT(config)
    adamw = torch.optim.AdamW(model.parameters(), foreach=True)
    model, optimizer = shard(model, adamw, **{"stage": 0, "precision": "bf16", "device": device} | options)
    tokens = torch.zeros(1, config.sequence, dtype=torch.long, device=device)
    taken: list[list[float]] = [[], [], []]

    def timed(phase: int, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken[phase].append(time.perf_counter() - begin)
        return result

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS):
        loss = timed(0, lambda: model(tokens, tokens))
        timed(1, loss.backward)
        timed(2, update)
    synchronize(model)
    return tuple(statistics.median(phase[2:]) for phase in taken)  # the first steps learn the order of units
