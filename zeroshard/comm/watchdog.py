"""Finds the rank that the other ranks wait for when a collective stalls.

Every rank posts its last collective once a second, into the key-value store of the process group. A rank whose
collective stalls reads the posts of all ranks. A thread does the posting: a rank that hangs in other code still posts,
and a rank that has died is silent.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
import weakref
from typing import Any, NamedTuple

import torch.distributed as dist

from ..system import compat

BEAT_SECONDS = 1.0
SILENT_BEATS = 3
LEAVE_SECONDS = 5.0
"""How long the end of the interpreter waits for posts under way."""

_posting: weakref.WeakSet[Watchdog] = weakref.WeakSet()


class Post(NamedTuple):
    """The last message of a rank about itself."""

    beat: int
    operations: int
    where: str


class Watchdog:
    """Posts this rank's progress, and explains a stall from the posts of all ranks."""

    def __init__(self, store: Any, rank: int, world: int, name: str, timeout: float) -> None:
        self._store, self._rank, self._world, self._name, self._timeout = store, rank, world, name, timeout
        self._operations, self._where, self._beat = 0, "the start", 0
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
        """One sentence that names the missing rank.

        Reads all posts twice, some beats apart: the post of a slow rank changes, the post of a dead rank does not.
        """
        failed = self.failure()
        if failed is not None:
            return f"rank {self._rank} waited for {waiting_in}, and {failed}"
        before = self._read_all()
        self._stopped.wait(SILENT_BEATS * BEAT_SECONDS)
        after = self._read_all()
        opening = f"rank {self._rank} waited for {waiting_in} (stall_timeout={self._timeout:g} s)"
        if not after:
            return (
                f"{opening}; rank 0, which has the store of the process group, cannot be reached: it has died or left"
            )
        others = [rank for rank in range(self._world) if rank != self._rank]
        for rank in others:
            if rank not in after:
                return f"{opening}; rank {rank} has died or left (never seen)"
            if before.get(rank) == after[rank]:
                return f"{opening}; rank {rank} has died or left (last seen at {after[rank].where})"
        behind = min(others, key=lambda rank: after[rank].operations)
        where = after[behind].where
        if all(post.operations <= after[behind].operations for post in after.values()):
            return f"{opening}; rank {behind} is alive, at {where}, and did not join"
        return f"{opening}; rank {behind} is alive but behind: its last collective was {where}"

    def _run(self) -> None:
        while True:
            self._beat += 1
            try:
                self._store.set(f"{self._name}/{self._rank}", json.dumps((self._beat, self._operations, self._where)))
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
