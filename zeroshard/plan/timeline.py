"""What occupies what, and when: a step laid out on lanes that each do one thing at a time."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class Lane(Enum):
    """Something that does one thing at a time."""

    DEVICE = "device"
    THREAD = "thread that drives the device"
    INSIDE = "links inside a node"
    BETWEEN = "links between nodes"
    DOWN = "from device to host"
    UP = "from host to device"
    HOST = "host"


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
        self._busy: dict[Lane, list[Span]] = {lane: [] for lane in Lane}
        self._held: dict[Lane, float] = dict.fromkeys(Lane, 0.0)

    def run(self, lane: Lane, seconds: float, *after: float) -> float:
        """Occupies a lane when it is free and all of ``after`` has passed; returns when that ends."""
        start = max(self.free(lane), *after) if after else self.free(lane)
        if seconds > 0:
            self._busy[lane].append(Span(start, start + seconds))
        return start + seconds

    def free(self, lane: Lane) -> float:
        """When all that a lane was asked for is done."""
        return max(self._held[lane], self._busy[lane][-1].end if self._busy[lane] else 0.0)

    def hold(self, lane: Lane, until: float) -> None:
        """Keeps a lane from starting anything before then; it is idle, not busy, meanwhile."""
        self._held[lane] = max(self._held[lane], until)

    def exposed(self, window: Span, *order: Lane) -> dict[Lane, float]:
        """Seconds of the window in which a lane was busy and none that comes before it in ``order``."""
        gaps, found = [window], {}
        for lane in order:
            rest = _subtract(gaps, [span for span in self._busy[lane] if span.end > window.start])
            found[lane] = _length(gaps) - _length(rest)
            gaps = rest
        return found


def _subtract(gaps: Sequence[Span], busy: Sequence[Span]) -> list[Span]:
    """Both sorted; what of the gaps is not busy."""
    left: list[Span] = []
    index = 0
    for start, end in gaps:
        while index < len(busy) and busy[index].end <= start:
            index += 1
        at, here = start, index
        while here < len(busy) and busy[here].start < end:
            if busy[here].start > at:
                left.append(Span(at, busy[here].start))
            at = max(at, busy[here].end)
            here += 1
        if at < end:
            left.append(Span(at, end))
    return left


def _length(spans: Sequence[Span]) -> float:
    return sum(span.end - span.start for span in spans)
