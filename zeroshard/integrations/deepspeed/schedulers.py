"""DeepSpeed's learning-rate schedulers that warm up, and any scheduler by its name."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.optim import lr_scheduler

from ...config.checks import nearest

ELSEWHERE = {"OneCycle": "torch's OneCycleLR", "LRRangeTest": "a scheduler of torch's"}


class Warmup:
    """DeepSpeed's schedulers WarmupLR, WarmupDecayLR (with ``total``) and WarmupCosineLR (with ``cosine``)."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lows: Any,
        highs: Any,
        *,
        steps: int,
        kind: str,
        total: int | None = None,
        cosine: float | None = None,
        last: int = -1,
    ) -> None:
        """The rate rises from ``lows`` to ``highs`` in so many ``steps``: one number, or one for each group."""
        if steps <= 0 or kind not in ("log", "linear"):
            raise ValueError(f'warmup_num_steps={steps} must be at least 1, warmup_type={kind!r} "log" or "linear"')
        self.optimizer, self.last_batch_iteration = optimizer, last
        count = len(optimizer.param_groups)
        self._lows, self._highs = ([*v] if isinstance(v, list | tuple) else [v] * count for v in (lows, highs))
        self._steps, self._kind, self._total, self._cosine = max(2, steps), kind, total, cosine
        if last == -1:
            self._set(self.get_lr())

    def get_lr(self) -> list[float]:
        """The learning rate of each group, for the coming step."""
        now = self.last_batch_iteration
        if now < 0:
            return [0.0 for _ in self._lows] if self._cosine is not None else list(self._lows)
        if now < self._steps:
            share = math.log(now + 1) / math.log(self._steps) if self._kind == "log" else now / self._steps
        elif self._total is None:
            share = 1.0
        elif self._cosine is None:
            share = max(0.0, (self._total - now) / max(1.0, self._total - self._steps))
        else:
            gone = min(1.0, (now - self._steps + 1) / max(1, self._total - self._steps))
            cosine = max(0.0, self._cosine + (1 - self._cosine) * (1 + math.cos(math.pi * gone)) / 2)
            return [high * cosine for high in self._highs]
        return [low + (high - low) * share for low, high in zip(self._lows, self._highs, strict=True)]

    def get_last_lr(self) -> list[float]:
        """The learning rates that were set last."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Sets the learning rates of the next step."""
        now = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = now
        self._set(self.get_lr())

    def _set(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]


def scheduler_of(name: str, given: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    """The scheduler that a configuration names, with the parameters that it gives."""
    given, rates = dict(given), [group["lr"] for group in optimizer.param_groups]
    if name in ELSEWHERE:
        raise ValueError(f"scheduler.type={name!r} is not there; pass {ELSEWHERE[name]} as lr_scheduler=")
    if name not in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        if not hasattr(lr_scheduler, name):
            raise ValueError(f"scheduler.type={name!r} is unknown{nearest(name, dir(lr_scheduler))}")
        return getattr(lr_scheduler, name)(optimizer, **given)
    steps, kind = given.pop("warmup_num_steps", 1000), given.pop("warmup_type", "log")
    build = partial(Warmup, optimizer, steps=steps, kind=kind, last=given.pop("last_batch_iteration", -1))
    if name != "WarmupLR" and "total_num_steps" not in given:
        raise ValueError(f"scheduler.params lacks total_num_steps, which {name} needs")
    total = None if name == "WarmupLR" else given.pop("total_num_steps")
    if name == "WarmupCosineLR":
        least, cosine = given.pop("warmup_min_ratio", 0.0), given.pop("cos_min_ratio", 0.0001)
        made = build([least * rate for rate in rates], rates, total=total, cosine=cosine)
    else:
        high = given.pop("warmup_max_lr", None if total is None else 0.001)
        made = build(given.pop("warmup_min_lr", 0.0), rates if high is None else high, total=total)
    if given:
        raise ValueError(f"scheduler.params has {', '.join(given)}, which {name} does not take; leave it out")
    return made
