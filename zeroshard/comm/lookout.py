"""Looks for collectives that would never end, and ends them.

A collective on the device stalls without the host's knowledge: the host may be in ``loss.item()``, and would wait for
ever. Two threads look for such a stall. They abort all collectives of the model, and the next call of the library
raises.

- The device's thread asks which collectives are done. It finds one that waits for other ranks, though all work of this
  rank before it is done.
- The posting thread looks at the number of collectives that the next rank has begun. It finds a rank that has not come
  to a collective that this rank began long ago, also where the device waits for something else, such as a collective
  of tensor parallelism. The same thread posts this rank's progress: a rank that hangs in other code still posts, and a
  rank that has died or was stopped is silent.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from . import posts as posting
from .store import StoreError, served_by_rank_zero
from .watchdog import Watchdog

LEAVE_SECONDS = 3.0
"""How long the end of the interpreter waits for posts and collectives under way."""
LONG_BEATS = 3
"""A process whose thread has not run for so many beats was held up."""
ABORT_SECONDS = 5.0
"""How long NCCL may take to abort."""

_looking: weakref.WeakSet[Lookout] = weakref.WeakSet()


class WatchedLane(Protocol):
    """Collectives whose end the watchdog looks after."""

    def waiting(self) -> object | None:
        """The collective on the device that waits for other ranks now. Its text names it. None if there is none."""

    def idle(self) -> bool:
        """Whether the device has completed all collectives."""

    def abort(self) -> None:
        """Ends all collectives on the device. None is possible afterwards."""


class Lookout:
    """The threads of one model that post its progress, and end a stall."""

    def __init__(self, watchdog: Watchdog, lanes: Sequence[WatchedLane] = (), *, on_device: bool = False) -> None:
        """``lanes`` may grow. ``on_device``: the lanes are on a device, which is asked, too."""
        self._watchdog, self._lanes, self._process = watchdog, lanes, os.getpid()
        self._history: deque[tuple[float, int, str]] = deque()
        """Times in the past, how many joint collectives this rank had begun, and the last of them."""
        self._complete = 0
        """How many joint collectives are known to be complete. All ranks have begun these."""
        self._looked = time.monotonic()
        self._stall_found = False
        self._end_thread: threading.Thread | None = None
        """Explains a stall that was found, and aborts."""
        self._on_device = on_device
        self._posting = threading.Thread(target=self._run, name="zeroshard-watchdog", daemon=True)
        self._asking = threading.Thread(target=self._watch_device, name="zeroshard-device", daemon=True)
        self._posting.start()
        if on_device:
            self._asking.start()
        _looking.add(self)

    def stop(self) -> None:
        self._watchdog.stopped.set()
        self._watchdog.store.stop()

    def _run(self) -> None:
        while True:
            try:
                self._watchdog.post()
                self._look()
            except StoreError as error:
                if error.lost:  # it does not come back, and torch would print a stack for each try
                    return
            if self._watchdog.stopped.wait(posting.BEAT_SECONDS):
                return

    def _look(self) -> None:
        """Ends collectives that another rank does not join, or that failed."""
        if self._stall_found:
            return
        if self._watchdog.broken is not None:
            self._start_end(self._abort)
            return
        if self._another_rank_failed():
            self._start_end(partial(self._end, self._watchdog.where))
            return
        begun, operation = self._overdue()
        if begun > self._complete and self._on_device and self._next_rank_is_late(begun):
            self._start_end(partial(self._end, operation))

    def _another_rank_failed(self) -> bool:
        try:
            return self._watchdog.posts.failure() is not None
        except StoreError as error:
            if error.lost:
                raise
            return False

    def _overdue(self) -> tuple[int, str]:
        """How many joint collectives this rank began so long ago that all ranks must have; and the last of them."""
        now, joint, history = time.monotonic(), self._watchdog.joint, self._history
        if now - self._looked > LONG_BEATS * posting.BEAT_SECONDS:
            history.clear()  # this process did not run for a while, and others may not have, either
        self._looked = now
        if not history or history[-1][1] != joint:
            history.append((now, joint, self._watchdog.where))
        limit = self._watchdog.timeout + 2 * posting.BEAT_SECONDS  # posts are up to a beat old, here and there
        while len(history) > 1 and now - history[1][0] > limit:
            history.popleft()
        since, begun, operation = history[0]
        return (begun, operation) if now - since > limit else (0, operation)

    def _next_rank_is_late(self, overdue: int) -> bool:
        """Whether the next rank has begun fewer joint collectives; or rank 0, which has the store, does not answer."""
        try:
            post = self._watchdog.posts.read((self._watchdog.rank + 1) % self._watchdog.world)
        except StoreError:
            return served_by_rank_zero()
        return post is not None and post.joint < overdue

    def _watch_device(self) -> None:
        """Ends collectives on the device that wait for other ranks for too long."""
        waits: dict[int, tuple[object, float]] = {}
        before = 0
        while not self._watchdog.stopped.wait(posting.BEAT_SECONDS) and not self._stall_found:
            with suppress(RuntimeError):  # an error of the device: the next use of the device raises it, too
                for number, lane in enumerate(self._lanes):
                    waiting, now = lane.waiting(), time.monotonic()
                    seen, since = waits.get(number, (None, now))
                    if waiting is not seen:
                        waits[number] = (waiting, now)
                    elif waiting is not None and now - since > self._watchdog.timeout and not self._stall_found:
                        self._start_end(partial(self._end, str(waiting)))
                if self._idle():
                    self._complete = before  # not what was begun since the last look: it may not be on its lane yet
                before = self._watchdog.joint

    def _end(self, operation: str) -> None:
        self._watchdog.break_off(self._watchdog.explain(operation))
        self._abort()

    def _start_end(self, work: Callable[[], None]) -> None:
        """Runs work on a thread of its own: this rank must go on posting, or others would think that it is dead."""
        self._stall_found = True
        self._end_thread = threading.Thread(target=work, name="zeroshard-end", daemon=True)
        self._end_thread.start()

    def _abort(self) -> None:
        """Aborts all lanes at the same time: the end of one may have to wait for the end of another."""
        threads = [threading.Thread(target=lane.abort, name="zeroshard-abort", daemon=True) for lane in self._lanes]
        latest = time.monotonic() + ABORT_SECONDS
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, latest - time.monotonic()))

    def end_with_interpreter(self, latest: float) -> None:
        """Called when the interpreter ends.

        A collective that waits for other ranks would keep the process from ending. A thread that came back from the
        store or from NCCL afterwards would abort the process.
        """
        if os.getpid() != self._process:  # a copy of the process that has these threads
            return
        self._watchdog.post()  # other ranks may compare their progress with this rank's
        self._watchdog.stopped.set()
        for thread in (self._asking, self._posting):
            if thread.is_alive():
                thread.join(max(0.0, latest - time.monotonic()))
        with suppress(RuntimeError):  # an error of the device
            while self._watchdog.broken is None and not self._idle() and time.monotonic() < latest:
                time.sleep(0.01)
            if not self._stall_found and not self._idle():
                self._abort()
        if self._end_thread is not None:
            self._end_thread.join(ABORT_SECONDS)
        self._watchdog.store.stop(max(0.0, latest - time.monotonic()))

    def _idle(self) -> bool:
        return {lane.idle() for lane in self._lanes} <= {True}  # all are asked, so that each forgets what is done


@atexit.register
def _end_all() -> None:
    latest = time.monotonic() + LEAVE_SECONDS
    for lookout in list(_looking):
        lookout.end_with_interpreter(latest)
