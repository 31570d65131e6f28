"""What occupies what, and when: a step laid out on lanes that each do one thing at a time."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple


class Resource(IntEnum):
    """Something that does one thing at a time."""

    DEVICE = 0
    THREAD = 1
    """That drives the device."""
    NODE_LINKS = 2
    """Links inside a node."""
    NETWORK = 3
    """Links between nodes."""
    PCIE_DOWN = 4
    """From device to host."""
    PCIE_UP = 5
    """From host to device."""
    HOST = 6


class Interval(NamedTuple):
    """A stretch of time, in seconds."""

    start: float
    end: float


class Timeline:
    """Operations in the order in which they were asked for, each as early as its lane and what it waits for allow.

    >>> timeline = Timeline()
    >>> sent = timeline.run(Resource.NODE_LINKS, 2.0)
    >>> timeline.run(Resource.DEVICE, 1.0, sent)
    3.0
    """

    def __init__(self) -> None:
        self._busy: list[list[tuple[float, float]]] = [[] for _ in Resource]
        """Starts and ends. Thousands of units are laid out, and so this is as plain as it goes."""
        self._free = [0.0] * len(Resource)

    def run(self, resource: Resource, seconds: float, *after: float) -> float:
        """Occupies a lane when it is free and all of ``after`` has passed; returns when that ends."""
        start = self._free[resource]
        for moment in after:
            if moment > start:
                start = moment
        end = start + seconds
        if seconds > 0:
            self._busy[resource].append((start, end))
            self._free[resource] = end
        return end

    def free(self, resource: Resource) -> float:
        """When all that a lane was asked for is done."""
        return self._free[resource]

    def idle_until(self, resource: Resource, until: float) -> None:
        """Keeps a lane from starting anything before then; it is idle, not busy, meanwhile."""
        if until > self._free[resource]:
            self._free[resource] = until

    def exposed(self, window: Interval, *order: Resource) -> dict[Resource, float]:
        """Seconds of the window in which a lane was busy and none that comes before it in ``order``."""
        gaps: Sequence[tuple[float, float]] = [window]
        found = {}
        for resource in order:
            rest = _subtract(gaps, [span for span in self._busy[resource] if span[1] > window.start])
            found[resource] = _length(gaps) - _length(rest)
            gaps = rest
        return found


def _subtract(
    gaps: Sequence[tuple[float, float]], busy: Sequence[tuple[float, float]]
) -> Sequence[tuple[float, float]]:
    """Both sorted; what of the gaps is not busy."""
    left = []
    index = 0
    for start, end in gaps:
        while index < len(busy) and busy[index][1] <= start:
            index += 1
        at = start
        for here in range(index, len(busy)):
            begins, ends = busy[here]
            if begins >= end:
                break
            if begins > at:
                left.append((at, begins))
            at = max(at, ends)
        if at < end:
            left.append((at, end))
    return left


def _length(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)
