"""How long something takes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

SECONDS = 0.4
"""Each measurement repeats for so long, at least three times."""
SETTLING_SECONDS = 1.2
"""The same, where a device is to settle."""


def seconds_once(work: Callable[[], object], device: torch.device) -> float:
    """Until the device is through with it."""
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """The quickest of some repetitions, after one that does not count: what else runs here only adds to them."""
    seconds_once(work, device)
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < SECONDS:
        taken.append(seconds_once(work, device))
    return min(taken)


def settled_seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """What it takes after a while: a GPU at its limit of power slows down within a second, and trains that way."""
    taken: list[float] = []
    while len(taken) < 4 or sum(taken) < SETTLING_SECONDS:
        taken.append(seconds_once(work, device))
    return statistics.median(taken[len(taken) // 2 :])
