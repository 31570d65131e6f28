"""What occupies what, and when: a step laid out on lanes that each do one thing at a time."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple


class Lane(IntEnum):
    """Something that does one thing at a time."""

    DEVICE = 0
    THREAD = 1
    """That drives the device."""
    INSIDE = 2
    """Links inside a node."""
    BETWEEN = 3
    """Links between nodes."""
    DOWN = 4
    """From device to host."""
    UP = 5
    """From host to device."""
    HOST = 6


class Span(NamedTuple):
    """A stretch of time, in seconds."""

    start: float
    end: float


class Timeline:
    """Operations in the order in which they were asked for, each as early as its lane and what it waits for allow.

    >>> timeline = Timeline()
    >>> sent = timeline.run(Lane.INSIDE, 2.0)
    >>> timeline.run(Lane.DEVICE, 1.0, sent)
    3.0
    """

    def __init__(self) -> None:
        self._busy: list[list[tuple[float, float]]] = [[] for _ in Lane]
        """Starts and ends. Thousands of units are laid out, and so this is as plain as it goes."""
        self._free = [0.0] * len(Lane)

    def run(self, lane: Lane, seconds: float, *after: float) -> float:
        """Occupies a lane when it is free and all of ``after`` has passed; returns when that ends."""
        start = self._free[lane]
        for moment in after:
            if moment > start:
                start = moment
        end = start + seconds
        if seconds > 0:
            self._busy[lane].append((start, end))
            self._free[lane] = end
        return end

    def free(self, lane: Lane) -> float:
        """When all that a lane was asked for is done."""
        return self._free[lane]

    def hold(self, lane: Lane, until: float) -> None:
        """Keeps a lane from starting anything before then; it is idle, not busy, meanwhile."""
        if until > self._free[lane]:
            self._free[lane] = until

    def exposed(self, window: Span, *order: Lane) -> dict[Lane, float]:
        """Seconds of the window in which a lane was busy and none that comes before it in ``order``."""
        gaps: Sequence[tuple[float, float]] = [window]
        found = {}
        for lane in order:
            rest = _subtract(gaps, [span for span in self._busy[lane] if span[1] > window.start])
            found[lane] = _length(gaps) - _length(rest)
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
