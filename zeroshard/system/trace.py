"""What ran when: the device's computing, copies both ways and the host's updates, by its own clocks.

    with zeroshard.trace("step.json") as trace:
        ...                                    # a step or two
    print(trace.exposed_copies())              # share of the time in which copies were all that happened

Off, it costs one comparison a phase. On, it costs two events a phase on the device and no synchronisation until the
block ends. The file opens in Perfetto (ui.perfetto.dev) and chrome://tracing.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

COMPUTE, DOWN, UP, UPDATE = "compute", "to the host", "to the device", "host update"
COPIES, WORK = (DOWN, UP), (COMPUTE, UPDATE)


class Waits(Protocol):
    """Something that works in the background."""

    def wait(self) -> None:
        """Until it has nothing to do."""


class Span(NamedTuple):
    """Seconds since the trace began, on one track."""

    track: str
    name: str
    start: float
    stop: float


class Trace:
    """Spans that are being recorded, or have been."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._open: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []
        self._phase: str | None = None
        self._phase_began: torch.cuda.Event | float | None = None
        self.spans: list[Span] = []
        """All spans in the order of their beginning, once the block has ended."""
        if device is not None:
            torch.cuda.synchronize(device)
            self._zero = torch.cuda.Event(enable_timing=True)
            self._zero.record()
            self._zero.synchronize()
        self._began = time.perf_counter()

    @contextmanager
    def on_host(self, track: str, name: str) -> Iterator[None]:
        """A phase by the host's clock."""
        start = time.perf_counter() - self._began
        try:
            yield
        finally:
            with self._lock:
                self.spans.append(Span(track, name, start, time.perf_counter() - self._began))

    @contextmanager
    def on_stream(self, track: str, name: str) -> Iterator[None]:
        """A phase of the current stream, or of the host where there is no device."""
        if self._device is None:
            with self.on_host(track, name):
                yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        try:
            yield
        finally:
            end.record()
            with self._lock:
                self._open.append((track, name, begin, end))

    def phase(self, name: str | None) -> None:
        """The device's computing turns from one phase to the next on the current stream; None is none."""
        if self._device is None:
            now = time.perf_counter() - self._began
            if isinstance(self._phase_began, float) and self._phase is not None:
                self.spans.append(Span(COMPUTE, self._phase, self._phase_began, now))
            self._phase, self._phase_began = name, now
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        if isinstance(self._phase_began, torch.cuda.Event) and self._phase is not None:
            self._open.append((COMPUTE, self._phase, self._phase_began, event))
        self._phase, self._phase_began = name, event

    def finish(self) -> None:
        """Waits for the device and reads its clock."""
        with self._lock:
            recorded, self._open = self._open, []
        if self._device is not None:
            torch.cuda.synchronize(self._device)
            for track, name, begin, end in recorded:
                start, stop = (self._zero.elapsed_time(event) / 1e3 for event in (begin, end))
                self.spans.append(Span(track, name, start, stop))
        self.spans.sort(key=lambda span: span.start)

    def busy(self, *tracks: str) -> list[tuple[float, float]]:
        """When any of these tracks had something to do: intervals that do not touch, in order."""
        return _union((span.start, span.stop) for span in self.spans if span.track in tracks)

    def exposed_copies(self) -> float:
        """The share of the traced time in which there were copies, and neither the device nor the host worked."""
        everything = self.busy(*COPIES, *WORK)
        if not everything:
            return 0.0
        work = self.busy(*WORK)
        hidden = _length(self.busy(*COPIES)) + _length(work) - _length(everything)
        return (_length(self.busy(*COPIES)) - hidden) / (everything[-1][1] - everything[0][0])

    def export(self, path: str | Path) -> None:
        """Writes the spans as Chrome's trace events."""
        tracks = {track: number for number, track in enumerate((COMPUTE, UPDATE, DOWN, UP))}
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
_sources: weakref.WeakSet[Waits] = weakref.WeakSet()


def wait_for(source: Waits) -> None:
    """Traces end when ``source`` has nothing to do any more."""
    _sources.add(source)


@contextmanager
def trace(path: str | Path | None = None) -> Iterator[Trace]:
    """Records what runs inside the block, in this process; writes it to ``path`` when the block ends."""
    global _active
    if _active is not None:
        raise RuntimeError("zeroshard.trace() is recording already; end that block first")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None
    _active = recording = Trace(device)
    try:
        yield recording
    finally:
        for source in list(_sources):
            with suppress(RuntimeError):  # that some model's update has failed is for its own callers to hear
                source.wait()  # an update that began inside the block belongs to it
        _active = None
        recording.finish()
        if path is not None:
            recording.export(path)


_NOTHING: AbstractContextManager[None] = nullcontext()


def on_host(track: str, name: str) -> AbstractContextManager[None]:
    """A phase by the host's clock, if anybody wants to know."""
    return _NOTHING if _active is None else _active.on_host(track, name)


def on_stream(track: str, name: str) -> AbstractContextManager[None]:
    """A phase of the current stream, if anybody wants to know."""
    return _NOTHING if _active is None else _active.on_stream(track, name)


def phase(name: str | None) -> None:
    """The device's computing turns from one phase to the next, if anybody wants to know."""
    if _active is not None:
        _active.phase(name)


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
