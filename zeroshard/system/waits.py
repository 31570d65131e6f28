"""Exposed waits: how long a rank waited with nothing else to do, by cause.

On a CPU this is the time in which the training thread was blocked. On a GPU the training thread runs ahead of the
device, so it may be blocked while the device still computes. There an event before the wait and one after it tell how
long the device stood still: it reaches the first when its earlier work is over. Nothing waits for these events. They
are read when they are known to be over, so the last waits of a step may be counted a step later.
"""

from __future__ import annotations

import time
from collections import deque
from enum import StrEnum
from typing import NamedTuple

import torch

Moment = torch.cuda.Event | float


class Cause(StrEnum):
    """What a rank waits for."""

    HOST_UPDATE = "host_update"
    """With offload: updates on the host, and the copy of new parameters to the device."""
    GRADIENT_COPIES = "gradient_copies"
    """With offload: gradients on their way to the host."""
    COLLECTIVES = "collectives"
    """Gathers and reduces. Counted on CPU ranks only: on a GPU the device waits for them, not the training thread."""
    AGREEMENT = "agreement"
    """The other ranks, in the agreement of every step."""


class _Open(NamedTuple):
    """A wait on a GPU whose length may not be known yet."""

    cause: Cause
    start: torch.cuda.Event
    stop: torch.cuda.Event


class Waits:
    """The exposed waits of one rank.

    >>> waits = Waits(torch.device("cpu"))
    >>> began = waits.begin()
    >>> waits.end(Cause.COLLECTIVES, began)
    >>> waits.seconds()["collectives"] > 0
    True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._seconds = dict.fromkeys(Cause, 0.0)
        self._open: deque[_Open] = deque()

    def begin(self) -> Moment:
        """Call before a wait. The result is for ``end``."""
        return time.perf_counter() if self._device is None else self._event()

    def end(self, cause: Cause, began: Moment) -> None:
        """Call after a wait."""
        if isinstance(began, float):
            self._seconds[cause] += time.perf_counter() - began
        else:
            self._open.append(_Open(cause, began, self._event()))

    def read(self) -> None:
        """Adds up the waits that the device has left behind. Called once a step, so that their number stays small."""
        while self._open and self._open[0].stop.query():
            wait = self._open.popleft()
            self._seconds[wait.cause] += wait.start.elapsed_time(wait.stop) / 1e3

    def seconds(self) -> dict[str, float]:
        """Seconds so far, by cause."""
        self.read()
        return {cause.value: seconds for cause, seconds in self._seconds.items()}

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
