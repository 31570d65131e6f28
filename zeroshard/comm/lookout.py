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
        self._watchdog, self._lanes = watchdog, lanes
        self._heard = 0
        """How many joint collectives this rank had begun when the store last answered."""
        self._begun: deque[tuple[float, int, str]] = deque()
        """Times in the past, how many joint collectives this rank had begun, and the last of them."""
        self._ended = False
        self._ending: threading.Thread | None = None
        """Explains a stall that was found, and aborts."""
        self._threads = [threading.Thread(target=self._run, name="zeroshard-watchdog", daemon=True)]
        if on_device:
            self._threads.append(threading.Thread(target=self._watch_device, name="zeroshard-device", daemon=True))
        for thread in self._threads:
            thread.start()
        _looking.add(self)

    def stop(self) -> None:
        self._watchdog.stopped.set()
        self._watchdog.store.stop()

    def _run(self) -> None:
        while True:
            self._watchdog.post()
            self._look()
            if self._watchdog.stopped.wait(posting.BEAT_SECONDS):
                return

    def _look(self) -> None:
        """Ends collectives that another rank does not join, or that failed."""
        if self._ended:
            return
        if self._watchdog.broken is not None:
            self._begin(self._abort)
            return
        now = time.monotonic()
        if not self._begun or self._begun[-1][1] != self._watchdog.joint:
            self._begun.append((now, self._watchdog.joint, self._watchdog.where))
        # Posts are up to a beat old, and so is what is known of this rank.
        while len(self._begun) > 1 and now - self._begun[1][0] > self._watchdog.timeout + 2 * posting.BEAT_SECONDS:
            self._begun.popleft()
        since, begun, operation = self._begun[0]
        overdue = begun if now - since > self._watchdog.timeout + 2 * posting.BEAT_SECONDS else 0
        if self._next_rank_is_late(overdue):
            self._begin(partial(self._end, operation))

    def _next_rank_is_late(self, overdue: int) -> bool:
        """Whether the next rank, or rank 0 if it has the store, has begun fewer than ``overdue`` joint collectives.

        A rank that has failed is late, too.
        """
        try:
            if self._watchdog.posts.failure() is not None:
                return True
            post = self._watchdog.posts.read((self._watchdog.rank + 1) % self._watchdog.world)
        except StoreError:
            return served_by_rank_zero() and self._heard < overdue
        self._heard = self._watchdog.joint
        return post is not None and post.joint < overdue

    def _watch_device(self) -> None:
        """Ends collectives on the device that wait for other ranks for too long."""
        waits: dict[int, tuple[object, float]] = {}
        while not self._watchdog.stopped.wait(posting.BEAT_SECONDS) and not self._ended:
            with suppress(RuntimeError):  # an error of the device: the next use of the device raises it, too
                for number, lane in enumerate(self._lanes):
                    waiting, now = lane.waiting(), time.monotonic()
                    seen, since = waits.get(number, (None, now))
                    if waiting is not seen:
                        waits[number] = (waiting, now)
                    elif waiting is not None and now - since > self._watchdog.timeout and not self._ended:
                        self._begin(partial(self._end, str(waiting)))

    def _end(self, operation: str) -> None:
        self._watchdog.break_off(self._watchdog.explain(operation))
        self._abort()

    def _begin(self, work: Callable[[], None]) -> None:
        """Runs work on a thread of its own: this rank must go on posting, or others would think that it is dead."""
        self._ended = True
        self._ending = threading.Thread(target=work, name="zeroshard-end", daemon=True)
        self._ending.start()

    def _abort(self) -> None:
        """Aborts all lanes at the same time: the end of one may have to wait for the end of another."""
        threads = [threading.Thread(target=lane.abort, name="zeroshard-abort", daemon=True) for lane in self._lanes]
        latest = time.monotonic() + ABORT_SECONDS
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, latest - time.monotonic()))

    def leave(self, latest: float) -> None:
        """Called when the interpreter ends.

        A collective that waits for other ranks would keep the process from ending. A thread that came back from the
        store or from NCCL afterwards would abort the process.
        """
        with suppress(RuntimeError, IndexError):  # an error of the device; the device's thread may look, too
            while self._watchdog.broken is None and not self._idle() and time.monotonic() < latest:
                time.sleep(0.01)
            if not self._ended and not self._idle():
                self._ended = True
                self._abort()
        if self._ending is not None:
            self._ending.join(ABORT_SECONDS)
        self.stop()
        for thread in self._threads:
            thread.join(max(0.0, latest - time.monotonic()))
        self._watchdog.store.stop(max(0.0, latest - time.monotonic()))

    def _idle(self) -> bool:
        return all(lane.idle() for lane in self._lanes)


@atexit.register
def _leave_all() -> None:
    latest = time.monotonic() + LEAVE_SECONDS
    for lookout in list(_looking):
        lookout.leave(latest)
