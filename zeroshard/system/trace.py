"""A trace of what ran when: computing on the device, collectives, copies both ways, and updates on the host.

    with zeroshard.trace("step.json") as trace:
        ...                                    # a step or two
    print(trace.exposed_copies())              # share of the time in which nothing but copies ran

Without a trace a phase costs one comparison. With a trace a phase costs two events on the device, and nothing waits
for the device until the block ends. The file opens in Perfetto (ui.perfetto.dev) and chrome://tracing.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

COMPUTE, DOWN, UP, UPDATE = "compute", "to the host", "to the device", "host update"
GATHER, REDUCE = "gather", "reduce"
"""Collectives: from when the lane can begin one until it is done. On a CPU, until somebody has waited for it."""
MARK = "mark"
"""Moments without length, such as the end of a step."""
COPIES, WORK = (DOWN, UP), (COMPUTE, UPDATE)
TRACKS = (COMPUTE, GATHER, REDUCE, UPDATE, DOWN, UP, MARK)


Moment = torch.cuda.Event | float
"""A point in time: an event on the device, or seconds by the host's clock."""


class BackgroundWork(Protocol):
    """Work that goes on while the training thread does something else."""

    def wait(self) -> None:
        """Returns when all its work is done."""


class Span(NamedTuple):
    """A phase on one track, in seconds since the trace began."""

    track: str
    name: str
    start: float
    stop: float


class Trace:
    """The spans of one ``with`` block."""

    def __init__(self, device: torch.device | None, *, yields: bool = False) -> None:
        """``yields``: a trace that the user begins takes the place of this one."""
        self._device, self.yields = device, yields
        self._lock = threading.Lock()
        self._recorded: list[tuple[str, str, Moment, Moment]] = []
        self._phase: tuple[str, Moment] | None = None
        self.spans: list[Span] = []
        """All spans in the order of their beginning, once the block has ended."""
        if device is not None:
            torch.cuda.synchronize(device)
            self._zero = torch.cuda.Event(enable_timing=True)
            self._zero.record()
            self._zero.synchronize()
        self._began = time.perf_counter()

    def on_host(self, track: str, name: str) -> AbstractContextManager[None]:
        """A phase by the host's clock."""
        return self._span(track, name, time.perf_counter)

    def on_stream(self, track: str, name: str) -> AbstractContextManager[None]:
        """A phase of the current stream, or of the host where there is no device."""
        return self._span(track, name, self._now)

    def phase(self, name: str | None) -> None:
        """On the current stream the device ends one phase of computing and begins the next. None begins no phase."""
        now = self._now()
        if self._phase is not None:
            self._record(COMPUTE, *self._phase, now)
        self._phase = None if name is None else (name, now)

    def mark(self, name: str) -> None:
        """Notes the moment that the current stream has reached."""
        now = self._now()
        self._record(MARK, name, now, now)

    def begin_span(self, track: str, name: str) -> Callable[[], None]:
        """Begins a phase by the host's clock. The returned function ends it."""
        begin = time.perf_counter()
        return lambda: self._record(track, name, begin, time.perf_counter())

    def finish(self) -> None:
        """Waits for the device and reads its clock."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        with self._lock:
            recorded, self._recorded = self._recorded, []
        for track, name, start, stop in recorded:
            self.spans.append(Span(track, name, self._seconds(start), self._seconds(stop)))
        self.spans.sort(key=lambda span: span.start)

    @contextmanager
    def _span(self, track: str, name: str, clock: Callable[[], Moment]) -> Iterator[None]:
        begin = clock()
        try:
            yield
        finally:
            self._record(track, name, begin, clock())

    def _record(self, track: str, name: str, begin: Moment, end: Moment) -> None:
        with self._lock:
            self._recorded.append((track, name, begin, end))

    def _now(self) -> Moment:
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, moment: Moment) -> float:
        return moment - self._began if isinstance(moment, float) else self._zero.elapsed_time(moment) / 1e3

    def busy(self, *tracks: str) -> list[tuple[float, float]]:
        """The intervals in which any of these tracks worked. They are in order and do not touch."""
        return _union((span.start, span.stop) for span in self.spans if span.track in tracks)

    def exposed_copies(self) -> float:
        """The share of the traced time in which copies ran, and neither the device nor the host computed."""
        everything = self.busy(*COPIES, *WORK)
        if not everything:
            return 0.0
        work = self.busy(*WORK)
        hidden = _length(self.busy(*COPIES)) + _length(work) - _length(everything)
        return (_length(self.busy(*COPIES)) - hidden) / (everything[-1][1] - everything[0][0])

    def export(self, path: str | Path) -> None:
        """Writes the spans as trace events of Chrome."""
        present = {span.track for span in self.spans}
        tracks = {track: number for number, track in enumerate(TRACKS) if track in present}
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": track}}
            for track, number in tracks.items()
        ]
        events += [
            {
                "ph": "X",
                "pid": 0,
                "tid": tracks[span.track],
                "name": span.name,
                "ts": span.start * 1e6,
                "dur": (span.stop - span.start) * 1e6,
            }
            for span in self.spans
        ]
        Path(path).write_text(json.dumps({"traceEvents": events}))


_active: Trace | None = None
_sources: weakref.WeakSet[BackgroundWork] = weakref.WeakSet()


def wait_for(source: BackgroundWork) -> None:
    """From now on a trace waits for the work of ``source`` before it ends."""
    _sources.add(source)


@contextmanager
def trace(path: str | Path | None = None) -> Iterator[Trace]:
    """Records what runs in this process inside the block. Writes it to ``path`` when the block ends."""
    global _active
    if _active is not None and not _active.yields:
        raise RuntimeError("zeroshard.trace() is recording already; end that block first")
    _active = recording = Trace(_device())
    try:
        yield recording
    finally:
        try:
            _wait_for_sources()
        finally:
            _active = None
        recording.finish()
        if path is not None:
            recording.export(path)


def begin() -> Trace | None:
    """Begins a trace that ends with ``end``. None if there is a trace already. ``trace()`` takes its place."""
    global _active
    if _active is not None:
        return None
    _active = Trace(_device(), yields=True)
    return _active


def end(recording: Trace) -> bool:
    """Ends a trace that ``begin`` returned. False if another trace took its place, so that it is not complete."""
    global _active
    if _active is not recording:
        return False
    try:
        _wait_for_sources()
    finally:
        _active = None
    recording.finish()
    return True


def drop(recording: Trace) -> None:
    """Ends a trace that ``begin`` returned and that nobody will read. Waits for nothing."""
    global _active
    if _active is recording:
        _active = None


def _device() -> torch.device | None:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None


def _wait_for_sources() -> None:
    """Waits for updates on the host: what began inside a trace belongs to it."""
    for source in list(_sources):
        with suppress(RuntimeError):  # a failed update raises in the next call of its own model
            source.wait()


_NOTHING: AbstractContextManager[None] = nullcontext()


def on_host(track: str, name: str) -> AbstractContextManager[None]:
    """A phase by the host's clock, if a trace is recording."""
    return _NOTHING if _active is None else _active.on_host(track, name)


def on_stream(track: str, name: str) -> AbstractContextManager[None]:
    """A phase of the current stream, if a trace is recording."""
    return _NOTHING if _active is None else _active.on_stream(track, name)


def collective(track: str | None, name: str) -> Callable[[], None] | None:
    """A collective that the host itself completes begins. Returns a function to call at its end; None without trace."""
    return None if _active is None or track is None else _active.begin_span(track, name)


def phase(name: str | None, title: str = "") -> None:
    """The device ends one phase of computing and begins the next, if a trace is recording. ``title`` is a unit's."""
    if _active is not None:
        _active.phase(f"{name} {title}" if title else name)


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in intervals)
