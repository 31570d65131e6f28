"""What the thread that drives a device needs for each unit, measured through the runtime itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..api import shard, synchronize
from ..config.job import ModelConfig
from ..config.offload import Offload
from ..system import compat
from ..train.gpt import GPT
from .update_probe import BusyHost

DEPTHS = (4, 16)
"""Blocks of the models that are timed; the difference is that of so many blocks."""
TURNS = 12
"""Of two steps, the second of which counts."""
LEARNING = 2
"""Turns that do not count: the first steps learn the order of units and make the optimizer's states."""
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "crowded": {},
    "checkpointed": {"checkpointing": True},
    "offloaded": {"offload": "cpu"},
    "interrupted": {"checkpointing": True, "offload": Offload(update_in_backward=True)},
}


def launch_seconds(device: torch.device, busy_host: BusyHost) -> dict[str, float]:
    """What it takes to launch a unit: the runtime on models with next to nothing to compute, of two depths.

    All of them take a step in turn, and what one takes longer than another is the median of what it took longer in
    each turn: a core that others use, too, is half as quick in one second as in the next. The crowded ones have the
    host at work meanwhile.
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
    if "divided" in steps:  # two gathers and a reduce
        found["launch.communicate"] = [seconds / 3 for seconds in longer("divided")]
    return {key: max(0.0, statistics.median(values)) for key, values in found.items()}


class Launches(NamedTuple):
    """Seconds of the driving thread for one unit in one step, and what that step took whatever it had."""

    forward: float
    backward: float
    update: float
    host: float
    """What the host's threads take when this one is through with the update."""
    fixed: float

    @property
    def passes(self) -> float:
        return self.forward + self.backward


def _in_turn(device: torch.device, busy_host: BusyHost) -> dict[str, list[Launches]]:
    """The steps of every way to train, that of one rank of eight among them where no real ranks would be asked."""
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
    """A model with next to nothing to compute."""

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
        """Seconds of forward, backward, update and what is left of it to the host."""
        self._step()
        synchronize(self._model)
        taken = self._step()
        begin = time.perf_counter()
        synchronize(self._model)
        return [*taken, time.perf_counter() - begin]

    def _step(self) -> list[float]:
        taken: list[float] = []

        def timed(work: Callable[[], Any]) -> Any:
            begin = time.perf_counter()
            result = work()
            if self._tokens.is_cuda:
                torch.cuda.synchronize(self._tokens.device)
            taken.append(time.perf_counter() - begin)
            return result

        loss = timed(lambda: self._model(self._tokens, self._tokens))
        timed(loss.backward)
        timed(self._update)
        return taken

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()
