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
from ..config.offload import Offload
from ..system import compat
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
    "interrupted": {"checkpointing": True, "offload": Offload(update_in_backward=True)},
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

    def times_as_long(way: str, other: str, phase: str) -> list[float]:
        pairs = zip(steps[way], steps[other], strict=True)
        return [max(1.0, getattr(slow, phase) / getattr(fast, phase)) for slow, fast in pairs]

    found = {
        "launch.crowded": times_as_long("crowded", "alone", "passes"),
        "launch.interrupted": times_as_long("interrupted", "checkpointed", "backward"),
        "launch.forward": [step.forward for step in alone],
        "launch.backward": [step.backward for step in alone],
        "launch.update": [step.update for step in alone],
        "launch.step": [step.fixed for step in alone],
        "launch.recompute": longer("checkpointed"),
        "launch.offload": longer("offloaded"),
        "launch.hand_over": [step.update for step in steps["offloaded"]],
        "launch.host": [step.update + step.host for step in steps["offloaded"]],
    }
    if "divided" in steps:  # a step of stage 3 has two gathers and a reduce for each unit
        found["launch.communicate"] = [seconds / 3 for seconds in longer("divided")]
    return {key: max(0.0, statistics.median(values)) for key, values in found.items()}


class Launches(NamedTuple):
    """Seconds of the driving thread in one step: for each unit, and once for the step (``fixed``)."""

    forward: float
    backward: float
    update: float
    host: float
    """Seconds of the host's threads after the driving thread has finished its part of the update."""
    fixed: float

    @property
    def passes(self) -> float:
        return self.forward + self.backward


def _in_turn(device: torch.device, busy_host: BusyHost) -> dict[str, list[Launches]]:
    """Steps of every way to train. Without a process group also those of one rank of eight, alone, in stage 3."""
    probes = {way: _probes(device, **options) for way, options in WAYS.items()}
    if dist.is_initialized():
        return _steps(probes, busy_host)
    with compat.one_rank_of(8, 0):
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
                forward, backward, update, host = units
                found[way].append(Launches(forward, backward, update, host, fixed=few[2] - DEPTHS[0] * update))
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

    def turn(self) -> list[float]:
        """Seconds of forward, backward, update, and of the host's work after the update."""
        self._step()
        synchronize(self._model)
        # Only the host's threads are timed, so this does not wait for the device.
        return [*self._step(), seconds_once(lambda: synchronize(self._model), torch.device("cpu"))]

    def _step(self) -> list[float]:
        losses: list[Tensor] = []
        forward = self._timed(lambda: losses.append(self._model(self._tokens, self._tokens)))
        return [forward, self._timed(losses[0].backward), self._timed(self._update)]

    def _timed(self, work: Callable[[], object]) -> float:
        return seconds_once(work, self._tokens.device)

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()
