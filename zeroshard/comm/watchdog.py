"""Finds the rank that the other ranks wait for when a collective stalls, and ends collectives that would never end.

Every rank posts its last collective and the user's call that it belongs to once a second (``posts``). A rank whose
collective stalls reads the posts of all ranks, and raises an error that names the missing rank. A thread does the
posting: a rank that hangs in other code still posts, and a rank that has died or was stopped is silent.

A collective on the device stalls without the host's knowledge: the host may be in ``loss.item()``, and would wait for
ever. So two threads look for such a stall, abort all collectives, and the next call of the library raises:

- The posting thread looks at the number of collectives that the next rank has begun. It finds a rank that has not come
  to a collective that this rank began long ago. For that it needs nothing from the device.
- Another thread asks the device which collectives are done. It finds those that all ranks have begun and none can end.
  It may not get an answer: a copy from memory that is not pinned makes other calls of CUDA wait, too.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple, Protocol

import torch.distributed as dist

from ..system import compat
from .posts import Post, Posts
from .store import BoundedStore, StoreError, served_by_rank_zero, server_of_the_store

BEAT_SECONDS = 1.0
SILENT_BEATS = 3
FORWARD = "a forward"
EVALUATION = "a forward without gradients, as in evaluation or generate()"
BACKWARD = "a backward"
LEAVE_SECONDS = 3.0
"""How long the end of the interpreter waits for posts and collectives under way."""

_posting: weakref.WeakSet[Watchdog] = weakref.WeakSet()


class StallError(RuntimeError):
    """A collective did not complete. The message names the missing rank, and where it was last seen."""


class WatchedLane(Protocol):
    """Collectives whose end the watchdog looks after."""

    def waiting(self) -> object | None:
        """The collective on the device that waits for other ranks now. Its text names it. None if there is none."""

    def idle(self) -> bool:
        """Whether the device has completed all collectives."""

    def abort(self) -> None:
        """Ends all collectives on the device. None is possible afterwards."""


class _Other(NamedTuple):
    """The rank that is waited for."""

    rank: int
    post: Post
    gone: bool

    def told(self) -> str:
        last = next(reversed(self.post.calls), None)
        if self.gone:
            return f"rank {self.rank} has died or left, or is stopped" + ("" if last is None else f", after {last}")
        if self.post.call is not None:
            return f"rank {self.rank} is in {self.post.call}"
        return f"rank {self.rank} is in no such call" + ("" if last is None else f"; its last one was {last}")


class Watchdog:
    """Posts this rank's progress, explains a stall from the posts of all ranks, and ends it."""

    def __init__(self, posts: Posts, rank: int, world: int, timeout: float) -> None:
        self._posts, self._rank, self._world, self._timeout = posts, rank, world, timeout
        self.lanes: list[WatchedLane] = []
        """What this watchdog looks after."""
        self._operations, self._joint, self._where, self._beat = 0, 0, "the start", 0
        self._pass: str | None = None
        """The forward or backward that runs. An exception may have ended it."""
        self._call: str | None = None
        """The other call that runs: of a function, say. It may be inside a forward."""
        self._calls: dict[str, int] = {}
        self._broken: str | None = None
        """Why a collective did not complete. The ranks no longer know which data has arrived where."""
        self._heard = 0
        """How many joint collectives this rank had begun when the store last answered."""
        self._begun: deque[tuple[float, int, str]] = deque()
        """Times in the past, how many joint collectives this rank had begun, and the last of them."""
        self._stopped, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="zeroshard-watchdog", daemon=True)
        self._device_thread = threading.Thread(target=self._watch_device, name="zeroshard-device", daemon=True)

    @classmethod
    def start(cls, rank: int, world: int, name: str, timeout: float) -> Watchdog:
        """Begins to post. ``name`` is the same on all ranks, and belongs to no other group."""
        posts = Posts(BoundedStore(compat.default_store()), rank, world, name)
        watchdog = cls(posts, rank, world, timeout)
        watchdog._thread.start()
        _posting.add(watchdog)
        return watchdog

    def watch_device(self) -> None:
        """Begins to look at the collectives on the device, too."""
        self._device_thread.start()

    @classmethod
    def silent(cls, rank: int, world: int) -> Watchdog:
        """Posts nothing. For a rank that waits for no other rank."""
        return cls(Posts(BoundedStore(compat.private_store()), rank, world, "alone"), rank, world, 0.0)

    @property
    def store(self) -> BoundedStore:
        """The store that the ranks post to."""
        return self._posts.store

    def note(self, where: str, *, joint: bool = True) -> None:
        """Remembers the collective that this rank begins, for the next post. ``joint``: all ranks make it."""
        self._operations += 1
        self._joint += joint
        self._where = where

    def begin_pass(self, call: str) -> None:
        """Remembers the forward or backward that begins."""
        self._count(call)
        self._pass = call

    def end_pass(self) -> None:
        self._pass = None

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Remembers a call of the user for as long as it lasts. A call that it makes itself does not count."""
        if self._call is not None:
            yield
            return
        self._count(call)
        self._call = call
        try:
            yield
        finally:
            self._call = None

    def _count(self, call: str) -> None:
        self._calls[call] = self._calls.pop(call, 0) + 1

    def stop(self) -> None:
        self._stopped.set()
        self.store.stop()

    def fail(self, what: str) -> None:
        """Tells the other ranks what went wrong on this rank. Any thread may call this."""
        self._posts.fail(what)

    def where(self, rank: int) -> str:
        """Where another rank was when it last posted."""
        with suppress(StoreError):
            post = self._posts.read(rank)
            return "nowhere: it has never posted" if post is None else post.where
        return "a place that the store does not tell"

    def is_ahead(self, rank: int) -> bool:
        """Whether another rank has begun a collective that this rank has not come to."""
        with suppress(StoreError):
            post = self._posts.read(rank)
            return post is not None and post.operations > self._operations
        return False

    # -- stalls ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises if a collective of this model has failed before."""
        if self._broken is not None:
            raise StallError(f"{self._broken} (no collective is possible since an earlier one failed)")

    def break_off(self, why: str) -> None:
        """Refuses all later collectives of this model, so that no rank uses data that did not arrive."""
        self._broken = self._broken or why

    @contextmanager
    def blaming(self, operation: str, *, half_done: bool = False) -> Iterator[None]:
        """Turns a time-out or lost connection of the backend into an error that names the rank and the operation.

        ``half_done``: no collective is possible after any other error either, because a sum may be incomplete.
        """
        self.check()
        try:
            yield
        except BaseException as error:
            if half_done and not _is_of_the_backend(error):
                self.break_off(f"{type(error).__name__}: {error}")
            self.blame(operation, error)
            raise

    def blame(self, operation: str, error: BaseException) -> None:
        """Raises the error that names rank and operation, if the given error is the backend's."""
        if not isinstance(error, StallError) and _is_of_the_backend(error):
            self.check()  # the thread has aborted this collective, and knows why
            self.break_off(f"{self.explain(operation)} (the backend said: {error})")
            raise StallError(self._broken) from error

    def explain(self, waiting_in: str) -> str:
        """Names the call that waited, the missing rank and where it is, then the collective.

        Reads all posts twice, some beats apart: the post of a slow rank changes, the post of a dead rank does not.
        """
        opening = f"rank {self._rank} waited for {waiting_in}"
        failed = self._posts.failure()
        if failed is not None:
            return f"{opening}, and {failed}"
        try:
            before = self._posts.read_all()
            self._stopped.wait(SILENT_BEATS * BEAT_SECONDS)
            after = self._posts.read_all()
        except StoreError as error:
            state = "cannot be reached: it has died or left" if error.lost else "does not answer: it is stopped"
            return self._blame(None, f"{self._timed(opening)}; {server_of_the_store()} {state}")
        explained, gone = self._compare(self._timed(opening), before, after)
        if gone:
            self.fail(explained)  # this rank ends, too: the others shall know which rank was the first
        return explained

    def _timed(self, opening: str) -> str:
        return f"{opening} (stall_timeout={self._timeout:g} s)"

    def _compare(self, opening: str, before: dict[int, Post], after: dict[int, Post]) -> tuple[str, bool]:
        """The explanation from two readings of the posts, and whether the rank that is missing is gone."""
        others = [rank for rank in range(self._world) if rank != self._rank]
        for rank in others:
            if rank not in after:
                return self._blame(None, f"{opening}; rank {rank} has died or left, or is stopped (never seen)"), True
            if before.get(rank) == after[rank]:
                details = f"{opening}; rank {rank} has died or left, or is stopped (last seen at {after[rank].where})"
                return self._blame(_Other(rank, after[rank], gone=True), details), True
        behind = min(others, key=lambda rank: after[rank].operations)
        where, other = after[behind].where, _Other(behind, after[behind], gone=False)
        if all(post.operations <= after[behind].operations for post in after.values()):
            details = f"{opening}; rank {behind} is alive, at {where}, and did not join"
        else:
            details = f"{opening}; rank {behind} is alive but behind: its last collective was {where}"
        return self._blame(other, details), False

    def _blame(self, other: _Other | None, details: str) -> str:
        """The explanation in the words of the user's program, followed by the details of the collective."""
        call = self._call or self._pass
        if call is None:
            return details
        sentences = [f"rank {self._rank} waited in {call}, which is collective: every rank must make it"]
        if other is not None:
            sentences.append(other.told())
            differing = None if other.gone else self._differing(other)  # its last post may be old
            if differing:
                sentences.append(differing)
        return f"{'; '.join(sentences)}. In detail: {details}"

    def _differing(self, other: _Other) -> str | None:
        """Names the calls that one of two ranks has made more often. Such calls were made on some ranks only."""
        theirs = other.post.calls
        found = [
            f"{call} ({self._calls.get(call, 0)} on rank {self._rank}, {theirs.get(call, 0)} on rank {other.rank})"
            for call in {**self._calls, **theirs}
            if self._calls.get(call, 0) != theirs.get(call, 0)
        ]
        return f"the ranks have not made the same calls so far: {', '.join(found)}" if found else None

    # -- the threads ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._beat += 1
            call = self._call or self._pass
            self._posts.post(Post(self._beat, self._operations, self._joint, self._where, call, dict(self._calls)))
            self._look()
            if self._stopped.wait(BEAT_SECONDS):
                return

    def _look(self) -> None:
        """Ends collectives that another rank does not join, or that failed."""
        if self._ended:
            return
        if self._broken is not None:
            self._begin(self._abort)
            return
        now = time.monotonic()
        if not self._begun or self._begun[-1][1] != self._joint:
            self._begun.append((now, self._joint, self._where))
        # Posts are up to a beat old, and so is what is known of this rank.
        while len(self._begun) > 1 and now - self._begun[1][0] > self._timeout + 2 * BEAT_SECONDS:
            self._begun.popleft()
        since, begun, operation = self._begun[0]
        overdue = begun if now - since > self._timeout + 2 * BEAT_SECONDS else 0
        if self._next_rank_is_late(overdue):
            self._begin(partial(self._end, operation))

    def _next_rank_is_late(self, overdue: int) -> bool:
        """Whether the next rank, or rank 0 if it has the store, has begun fewer than ``overdue`` joint collectives.

        A rank that has failed is late, too.
        """
        try:
            if self._posts.failure() is not None:
                return True
            post = self._posts.read((self._rank + 1) % self._world)
        except StoreError:
            return served_by_rank_zero() and self._heard < overdue
        self._heard = self._joint
        return post is not None and post.joint < overdue

    def _watch_device(self) -> None:
        """Ends collectives on the device that wait for other ranks for too long."""
        waits: dict[int, tuple[object, float]] = {}
        while not self._stopped.wait(BEAT_SECONDS) and not self._ended:
            with suppress(RuntimeError):  # an error of the device: the next use of the device raises it, too
                for number, lane in enumerate(self.lanes):
                    waiting, now = lane.waiting(), time.monotonic()
                    seen, since = waits.get(number, (None, now))
                    if waiting is not seen:
                        waits[number] = (waiting, now)
                    elif waiting is not None and now - since > self._timeout and not self._ended:
                        self._begin(partial(self._end, str(waiting)))

    def _end(self, operation: str) -> None:
        self.break_off(self.explain(operation))
        self._abort()

    def _begin(self, work: Callable[[], None]) -> None:
        """Runs work on a thread of its own: this rank must go on posting, or others would think that it is dead."""
        self._ended = True
        threading.Thread(target=work, name="zeroshard-abort", daemon=True).start()

    def _abort(self) -> None:
        """Aborts all lanes at the same time: the end of one may have to wait for the end of another."""
        threads = [threading.Thread(target=lane.abort, name="zeroshard-abort", daemon=True) for lane in self.lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LEAVE_SECONDS)

    def leave(self, latest: float) -> None:
        """Called when the interpreter ends. A thread that used the store afterwards would abort the process.

        A collective that waits for other ranks would keep the process from ending.
        """
        with suppress(RuntimeError, IndexError):  # the device's thread may look, too
            while not self._ended and not all(lane.idle() for lane in self.lanes) and time.monotonic() < latest:
                time.sleep(0.01)
            if not self._ended and not all(lane.idle() for lane in self.lanes):
                self._abort()
        self.stop()
        self._thread.join(max(0.0, latest - time.monotonic()))
        self.store.stop(max(0.0, latest - time.monotonic()))


def _is_of_the_backend(error: BaseException) -> bool:
    """Whether the backend raised an error. Gloo raises plain RuntimeErrors, which are known by their text."""
    signs = ("gloo", "timed out")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)
    )


@atexit.register
def _leave_all() -> None:
    latest = time.monotonic() + LEAVE_SECONDS
    for watchdog in list(_posting):
        watchdog.leave(latest)
