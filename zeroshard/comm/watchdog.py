"""Finds the rank that the other ranks wait for when a collective stalls, and the call that only some ranks make.

Every rank posts its last collective and the user's call that it belongs to once a second, into the key-value store of
the process group. A rank whose collective stalls reads the posts of all ranks. A thread does the posting: a rank that
hangs in other code still posts, and a rank that has died is silent.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from ..system import compat

BEAT_SECONDS = 1.0
SILENT_BEATS = 3
FORWARD = "a forward"
EVALUATION = "a forward without gradients, as in evaluation or generate()"
BACKWARD = "a backward"
LEAVE_SECONDS = 5.0
"""How long the end of the interpreter waits for posts under way."""

_posting: weakref.WeakSet[Watchdog] = weakref.WeakSet()


class Post(NamedTuple):
    """The last message of a rank about itself."""

    beat: int
    operations: int
    where: str
    """The collective that the rank began last."""
    call: str | None
    """The user's call that the rank is in."""
    calls: dict[str, int]
    """How many times the rank has begun each of the user's calls. The last one comes last."""


class _Other(NamedTuple):
    """The rank that is waited for."""

    rank: int
    post: Post
    gone: bool

    def told(self) -> str:
        last = next(reversed(self.post.calls), None)
        if self.gone:
            return f"rank {self.rank} has died or left, " + ("before any call" if last is None else f"after {last}")
        if self.post.call is not None:
            return f"rank {self.rank} is in {self.post.call}"
        return f"rank {self.rank} is in no such call" + ("" if last is None else f"; its last one was {last}")


class Watchdog:
    """Posts this rank's progress, and explains a stall from the posts of all ranks."""

    def __init__(self, store: Any, rank: int, world: int, name: str, timeout: float) -> None:
        self._store, self._rank, self._world, self._name, self._timeout = store, rank, world, name, timeout
        self._operations, self._where, self._beat = 0, "the start", 0
        self._pass: str | None = None
        """The forward or backward that runs. An exception may have ended it."""
        self._call: str | None = None
        """The other call that runs: of a function, say. It may be inside a forward."""
        self._calls: dict[str, int] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeroshard-watchdog", daemon=True)

    @classmethod
    def start(cls, rank: int, world: int, name: str, timeout: float) -> Watchdog:
        """Begins to post. ``name`` is the same on all ranks, and belongs to no other group."""
        watchdog = cls(compat.default_store(), rank, world, f"zeroshard/{name}", timeout)
        watchdog._thread.start()
        _posting.add(watchdog)
        return watchdog

    @classmethod
    def silent(cls, rank: int, world: int) -> Watchdog:
        """Posts nothing. For a rank that waits for no other rank."""
        stores: Any = dist  # its annotations do not list HashStore
        return cls(stores.HashStore(), rank, world, "zeroshard", 0.0)

    def note(self, where: str) -> None:
        """Remembers the collective that this rank begins, for the next post."""
        self._operations += 1
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

    def fail(self, what: str) -> None:
        """Tells the other ranks what went wrong on this rank. Any thread may call this."""
        with contextlib.suppress(RuntimeError, dist.DistError):  # the store is gone: the job is ending
            self._store.set(f"{self._name}/failed", json.dumps((self._rank, what)))

    def failure(self) -> str | None:
        """What went wrong on another rank, if that rank has called ``fail``."""
        with contextlib.suppress(RuntimeError, dist.DistError):
            if self._store.check([f"{self._name}/failed"]):
                rank, what = json.loads(self._store.get(f"{self._name}/failed"))
                return None if rank == self._rank else f"rank {rank} failed: {what}"
        return None

    def where(self, rank: int) -> str:
        """Where another rank was when it last posted."""
        post = self._read_all().get(rank)
        return "nowhere: it has never posted" if post is None else post.where

    def is_ahead(self, rank: int) -> bool:
        """Whether another rank has begun a collective that this rank has not come to."""
        post = self._read_all().get(rank)
        return post is not None and post.operations > self._operations

    def explain(self, waiting_in: str) -> str:
        """Names the call that waited, the missing rank and where it is, then the collective.

        Reads all posts twice, some beats apart: the post of a slow rank changes, the post of a dead rank does not.
        """
        opening = f"rank {self._rank} waited for {waiting_in}"
        failed = self.failure()
        if failed is not None:
            return f"{opening}, and {failed}"
        before = self._read_all()
        self._stopped.wait(SILENT_BEATS * BEAT_SECONDS)
        after = self._read_all()
        opening += f" (stall_timeout={self._timeout:g} s)"
        if not after:
            return self._blame(
                None,
                f"{opening}; rank 0, which has the store of the process group, cannot be reached: it has died or left",
            )
        others = [rank for rank in range(self._world) if rank != self._rank]
        for rank in others:
            if rank not in after:
                return self._blame(None, f"{opening}; rank {rank} has died or left (never seen)")
            if before.get(rank) == after[rank]:
                last = f"last seen at {after[rank].where}"
                return self._blame(
                    _Other(rank, after[rank], gone=True), f"{opening}; rank {rank} has died or left ({last})"
                )
        behind = min(others, key=lambda rank: after[rank].operations)
        where, other = after[behind].where, _Other(behind, after[behind], gone=False)
        if all(post.operations <= after[behind].operations for post in after.values()):
            return self._blame(other, f"{opening}; rank {behind} is alive, at {where}, and did not join")
        return self._blame(other, f"{opening}; rank {behind} is alive but behind: its last collective was {where}")

    def _blame(self, other: _Other | None, details: str) -> str:
        """The explanation in the words of the user's program, followed by the details of the collective."""
        call = self._call or self._pass
        if call is None:
            return details
        sentences = [f"rank {self._rank} waited in {call}, which is collective: every rank must make it"]
        if other is not None:
            sentences.append(other.told())
            differing = self._differing(other)
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

    def _run(self) -> None:
        while True:
            self._beat += 1
            try:
                post = Post(self._beat, self._operations, self._where, self._call or self._pass, dict(self._calls))
                self._store.set(f"{self._name}/{self._rank}", json.dumps(post))
            except (RuntimeError, dist.DistError):
                return  # the store is gone: the job is ending
            if self._stopped.wait(BEAT_SECONDS):
                return

    def _read_all(self) -> dict[int, Post]:
        posts: dict[int, Post] = {}
        deadline = time.monotonic() + BEAT_SECONDS
        try:
            for rank in range(self._world):
                key = f"{self._name}/{rank}"
                if time.monotonic() < deadline and self._store.check([key]):
                    posts[rank] = Post(*json.loads(self._store.get(key)))
        except (RuntimeError, dist.DistError):
            return {}
        return posts


@atexit.register
def _stop_all() -> None:
    """Ends the posting threads. A thread that used the store after the interpreter's end would abort the process."""
    watchdogs = list(_posting)
    for watchdog in watchdogs:
        watchdog.stop()
    latest = time.monotonic() + LEAVE_SECONDS
    for watchdog in watchdogs:
        watchdog._thread.join(max(0.0, latest - time.monotonic()))
