"""What a traced step did on each lane, what its computing waited for, and where its time went."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from .journal import Span, Traced

COMPUTE, GATHER, REDUCE = "compute", "gather", "reduce"
DOWN, UPDATE, UP = "to the host", "host update", "to the device"
LANES = (COMPUTE, GATHER, REDUCE, DOWN, UPDATE, UP)
"""In the order of the chart. The names are those of ``zeroshard.trace``."""
TITLES = {DOWN: "device → host", UP: "host → device"}
"""What a chart writes instead of a lane's name."""
OTHER = "other"
"""The cause of a wait in which no lane did anything: Python, data, or other ranks."""
PARTS = ("forward", "loss", "backward", "norm", "update")
"""What the lane of computing does. A span's name begins with one of them."""
CLOSE = 0.02
"""Work that ended this share of a step before computing went on counts as what it waited for."""


class Wait(NamedTuple):
    """Time in which nothing was computed."""

    start: float
    stop: float
    cause: str
    """A lane, or ``OTHER``."""


class Window(NamedTuple):
    """One step of a trace. Times are seconds from its beginning."""

    step: int
    seconds: float
    spans: list[Span]
    waits: list[Wait]

    @property
    def shares(self) -> dict[str, float]:
        """Seconds by part of computing, and by cause of waiting as ``wait: CAUSE``. They add up to the step."""
        found = dict.fromkeys(PARTS, 0.0)
        for part, start, stop in _first_of(self.spans):
            found[part] = found.get(part, 0.0) + stop - start
        for wait in self.waits:
            name = f"wait: {wait.cause}"
            found[name] = found.get(name, 0.0) + wait.stop - wait.start
        return {part: seconds for part, seconds in found.items() if seconds > 0}

    def busy(self, lane: str) -> float:
        """Seconds in which a lane worked."""
        return sum(stop - start for start, stop in _union((s.start, s.stop) for s in self.spans if s.lane == lane))


def windows(traced: Traced) -> list[Window]:
    """The steps of a trace. Spans that reach into a step from another one are cut."""
    found = []
    for step, (start, stop) in zip(traced.steps, pairwise(traced.marks), strict=True):
        if start == stop:
            continue
        spans = [
            Span(span.lane, span.name, max(span.start, start) - start, min(span.stop, stop) - start)
            for span in traced.spans
            if min(span.stop, stop) - start > max(span.start, start) - start and span.lane in LANES
        ]
        waits = list(_waits(spans, stop - start))
        for lane in (UP, DOWN, UPDATE):
            waits = list(_merged(_without_breaks(lane, waits, spans, CLOSE * (stop - start) / 4)))
        found.append(Window(step, stop - start, spans, waits))
    return found


def typical(traced: Traced | None) -> Window | None:
    """The step of a trace that stands for all: the faster ones are without an evaluation or a save.

    The first step counts only if there is no other: when a trace begins, nothing is under way that this step could wait
    for.
    """
    found = windows(traced) if traced is not None else []
    found = sorted(found[1:] or found, key=lambda window: window.seconds)
    return found[(len(found) - 1) // 2] if found else None


def _waits(spans: Sequence[Span], seconds: float) -> Iterator[Wait]:
    """The times without computing, each with its cause, in order.

    Computing goes on when what it waited for has ended. So the cause of the end of a wait is the work that ended just
    before it, and the cause of what comes before is found in the same way at the beginning of that work.
    """
    others = sorted((span for span in spans if span.lane != COMPUTE), key=lambda span: span.stop)
    stops = [span.stop for span in others]
    reached = 0.0
    computing = _union((span.start, span.stop) for span in spans if span.lane == COMPUTE)
    for start, stop in [*computing, (seconds, seconds)]:
        if start > reached:
            yield from _merged(reversed(list(_causes(others, stops, reached, start, CLOSE * seconds))))
        reached = max(reached, stop)


def _causes(others: Sequence[Span], stops: Sequence[float], begin: float, end: float, close: float) -> Iterator[Wait]:
    """What ended when, from the end of a wait back to its beginning."""
    while end > begin:
        number = bisect_right(stops, end) - 1
        while number >= 0 and others[number].start >= end:  # without length
            number -= 1
        running = next((span for span in others[number + 1 :] if span.start < end < span.stop), None)
        last = others[number] if number >= 0 and others[number].stop > begin else None
        if running is not None and (last is None or last.stop < end - close):
            last = running
        if last is None:
            yield Wait(begin, end, OTHER)
            return
        stop = min(last.stop, end)
        if stop < end:
            yield Wait(stop, end, OTHER)
        start = max(last.start, begin)
        yield Wait(start, stop, last.lane)
        end = start


def _without_breaks(lane: str, waits: Sequence[Wait], spans: Sequence[Span], close: float) -> Iterator[Wait]:
    """The waits, where those that only shift the wait for a lane are given that lane as their cause.

    If a lane works without a break until computing waits for it, then all waits before, while it worked, cost nothing
    of their own: without them computing would have waited longer at the end.
    """
    runs: list[tuple[float, float]] = []
    for start, stop in _union((span.start, span.stop) for span in spans if span.lane == lane):
        if runs and start - runs[-1][1] <= close:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    ends = [
        max((w.stop for w in waits if w.cause == lane and start < w.stop <= stop), default=start)
        for start, stop in runs
    ]
    bounds = [(start, end) for (start, _), end in zip(runs, ends, strict=True) if end > start]
    for wait in waits:
        reached = wait.start
        for start, end in bounds:
            if max(reached, start) < min(wait.stop, end):
                if reached < start:
                    yield Wait(reached, start, wait.cause)
                yield Wait(max(reached, start), min(wait.stop, end), lane)
                reached = min(wait.stop, end)
        if reached < wait.stop:
            yield Wait(reached, wait.stop, wait.cause)


def _merged(waits: Iterable[Wait]) -> Iterator[Wait]:
    """Waits with the same cause that touch are one."""
    last: Wait | None = None
    for wait in waits:
        if last is not None and last.cause == wait.cause and last.stop == wait.start:
            last = Wait(last.start, wait.stop, last.cause)
            continue
        if last is not None:
            yield last
        last = wait
    if last is not None:
        yield last


def _first_of(spans: Sequence[Span]) -> Iterator[tuple[str, float, float]]:
    """The parts of computing without overlap: where two overlap, the time belongs to the one that began first."""
    reached = 0.0
    for span in sorted((span for span in spans if span.lane == COMPUTE), key=lambda span: span.start):
        if span.stop > reached:
            words = span.name.replace(",", " ").split()
            part = words[0] if words and words[0] in PARTS else "forward"
            yield part, max(span.start, reached), span.stop
            reached = span.stop


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged
