"""Measures the seconds that the thread which drives a device needs to launch a unit, with the runtime itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..api import shard, synchronize
from ..config.job import ModelConfig
from ..system import compat_groups
from ..train.gpt import GPT
from .stopwatch import seconds_once
from .update_probe import BusyHost

DEPTHS = (4, 16)
"""Blocks of the two models that are timed. The difference of their times is the time of the additional blocks."""
TURNS = 12
"""Measurements of each model. A turn has two steps, and the second one is timed."""
LEARNING = 2
"""First turns that do not count, because the first steps learn the order of units and make the optimizer's states."""
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "crowded": {},
    "checkpointed": {"checkpointing": True},
    "offloaded": {"offload": "cpu"},
}
"""The ways to train that are timed, with their options. In the way "crowded" the host is busy at the same time."""


def launch_seconds(device: torch.device, busy_host: BusyHost) -> dict[str, float]:
    """Seconds to launch a unit: the runtime trains models of two depths that compute almost nothing.

    All models take their steps in turn. The difference between two of them is the median over the turns, because a core
    that other processes use too may be half as fast in one second as in the next.
    """
    steps = _in_turn(device, busy_host)
    alone = steps["alone"]

    def longer(way: str) -> list[float]:
        return [step.passes - other.passes for step, other in zip(steps[way], alone, strict=True)]

    found = {
        "launch.block": [step.passes for step in alone],
        "launch.recompute": longer("checkpointed"),
        "launch.host": [step.host for step in steps["offloaded"]],
        "launch.crowded": [
            max(1.0, slow.passes / fast.passes) for slow, fast in zip(steps["crowded"], alone, strict=True)
        ],
    }
    if "divided" in steps:  # a step of stage 3 has two gathers and a reduce for each unit
        found["launch.communicate"] = [seconds / 3 for seconds in longer("divided")]
    return {key: max(0.0, statistics.median(values)) for key, values in found.items()}


class Launches(NamedTuple):
    """Seconds for one block."""

    passes: float
    """Forward and backward, of the driving thread."""
    host: float
    """The update, until the host's threads have finished it."""


def _in_turn(device: torch.device, busy_host: BusyHost) -> dict[str, list[Launches]]:
    """Steps of every way to train. Without a process group also those of one rank of eight, alone, in stage 3."""
    probes = {way: _probes(device, **options) for way, options in WAYS.items()}
    if dist.is_initialized():
        return _steps(probes, busy_host)
    with compat_groups.one_rank_of(8, 0):
        probes["divided"] = _probes(device, stage=3)
        return _steps(probes, busy_host)


def _probes(device: torch.device, **options: Any) -> tuple[_Probe, ...]:
    return tuple(_Probe(device, layers, **options) for layers in DEPTHS)


def _steps(probes: dict[str, tuple[_Probe, ...]], busy_host: BusyHost) -> dict[str, list[Launches]]:
    found: dict[str, list[Launches]] = {way: [] for way in probes}
    for number in range(LEARNING + TURNS):
        for way, (shallow, deep) in probes.items():
            with busy_host if way == "crowded" else nullcontext():
                few, many = shallow.turn(), deep.turn()
            units = [(late - early) / (DEPTHS[1] - DEPTHS[0]) for early, late in zip(few, many, strict=True)]
            if number >= LEARNING:
                found[way].append(Launches(*units))
    return found


class _Probe:
    """A model that computes almost nothing."""

    def __init__(self, device: torch.device, layers: int, *, checkpointing: bool = False, **options: Any) -> None:
        shape: dict[str, Any] = {"hidden": 64, "heads": 1, "sequence": 16, "vocabulary": 64}
        config = ModelConfig(layers=layers, checkpointing=checkpointing, **shape)
        with torch.device("meta"):
            model: nn.Module = GPT(config)
        adamw = torch.optim.AdamW(model.parameters(), foreach=True)
        options = {"stage": 0, "precision": "bf16", "device": device} | options
        self._model, self._optimizer = shard(model, adamw, **options)
        self._tokens = torch.zeros(1, config.sequence, dtype=torch.long, device=device)

    def turn(self) -> tuple[float, float]:
        """Seconds of forward and backward, and of the update until the host's threads have finished it."""
        self._step()
        synchronize(self._model)
        passes, update = self._step()
        # Only the host's threads are timed, so this does not wait for the device.
        return passes, update + seconds_once(lambda: synchronize(self._model), torch.device("cpu"))

    def _step(self) -> tuple[float, float]:
        losses: list[Tensor] = []
        forward = self._timed(lambda: losses.append(self._model(self._tokens, self._tokens)))
        return forward + self._timed(losses[0].backward), self._timed(self._update)

    def _timed(self, work: Callable[[], object]) -> float:
        return seconds_once(work, self._tokens.device)

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()
