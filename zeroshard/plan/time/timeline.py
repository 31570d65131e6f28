"""A step laid out in time: which operation occupies which resource of a machine, and when."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple


class Resource(IntEnum):
    """A part of a machine that does one thing at a time.

    If several are busy at once, ``StepTime`` counts the time for the first of them in this order.
    """

    DEVICE = 0
    THREAD = 1
    """The thread that drives the device."""
    HOST = 2
    """The cores that update on the host."""
    NETWORK = 3
    """The links between nodes."""
    NODE_LINKS = 4
    """The links between devices of a node."""
    PCIE_UP = 5
    """Copies from host to device."""
    PCIE_DOWN = 6
    """Copies from device to host."""


class Interval(NamedTuple):
    """An interval of time, in seconds."""

    start: float
    end: float


class Timeline:
    """Lays out operations in the order of the calls, each as early as its resource and its conditions allow.

    >>> timeline = Timeline()
    >>> sent = timeline.run(Resource.NODE_LINKS, 2.0)
    >>> timeline.run(Resource.DEVICE, 1.0, sent)
    3.0
    """

    def __init__(self) -> None:
        self._busy: list[list[tuple[float, float]]] = [[] for _ in Resource]
        """By resource: starts and ends of operations. Plain tuples, because thousands of units are laid out."""
        self._free = [0.0] * len(Resource)

    def run(self, resource: Resource, seconds: float, *after: float) -> float:
        """Occupies a resource as soon as it is free and all times in ``after`` have passed. Returns the end."""
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
        """The time when a resource has finished all its operations."""
        return self._free[resource]

    def idle_until(self, resource: Resource, until: float) -> None:
        """Lets a resource start nothing before ``until``. Until then the resource counts as idle, not as busy."""
        if until > self._free[resource]:
            self._free[resource] = until

    def exposed(self, window: Interval, *order: Resource) -> dict[Resource, float]:
        """For each resource: seconds of the window in which it was busy and no earlier resource of ``order`` was."""
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
    """The parts of the gaps that are not busy. Both lists are sorted."""
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
