"""Measures how long work takes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

SECONDS = 0.4
"""A measurement repeats for at least this long, and at least three times."""
SETTLING_SECONDS = 1.2
"""The same for a measurement in which the device reaches its steady speed; at least four times."""


def seconds_once(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, until the device has finished."""
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of several calls, because other processes only add time. The first call does not count."""
    seconds_once(work, device)
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < SECONDS:
        taken.append(seconds_once(work, device))
    return min(taken)


def settled_seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """The median of the later calls. A GPU at its power limit slows down within a second, and trains at that speed."""
    taken: list[float] = []
    while len(taken) < 4 or sum(taken) < SETTLING_SECONDS:
        taken.append(seconds_once(work, device))
    return statistics.median(taken[len(taken) // 2 :])
