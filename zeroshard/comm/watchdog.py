"""Who is missing? Every rank posts where it is, once a second; a rank whose collective stalls reads what all posted.

Posting is done by a thread through the process group's key-value store, so that a rank which hangs in other code is
still described, and a rank which died is known by its silence.
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
"""How long posts under way are waited for when the interpreter ends."""

_posting: weakref.WeakSet[Watchdog] = weakref.WeakSet()


class Post(NamedTuple):
    """What a rank last said of itself."""

    beat: int
    operations: int
    where: str


class Watchdog:
    """Posts this rank's progress and explains a stall from everybody's."""

    def __init__(self, store: Any, rank: int, world: int, name: str) -> None:
        self._store, self._rank, self._world, self._name = store, rank, world, name
        self._operations, self._where, self._beat = 0, "the start", 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeroshard-watchdog", daemon=True)

    @classmethod
    def start(cls, rank: int, world: int, name: str) -> Watchdog:
        """Begins to post. ``name`` is the same on all ranks, and no other group's."""
        watchdog = cls(compat.default_store(), rank, world, f"zeroshard/{name}")
        watchdog._thread.start()
        _posting.add(watchdog)
        return watchdog

    def note(self, where: str) -> None:
        self._operations += 1
        self._where = where

    def stop(self) -> None:
        self._stopped.set()

    def fail(self, what: str) -> None:
        """Leaves word of what went wrong on this rank, for those that will wait for it in vain. On any thread."""
        with contextlib.suppress(RuntimeError, dist.DistError):  # the store is gone: the job is ending
            self._store.set(f"{self._name}/failed", json.dumps((self._rank, what)))

    def failure(self) -> str | None:
        """What went wrong on another rank, where one has left word."""
        with contextlib.suppress(RuntimeError, dist.DistError):
            if self._store.check([f"{self._name}/failed"]):
                rank, what = json.loads(self._store.get(f"{self._name}/failed"))
                return None if rank == self._rank else f"rank {rank} failed: {what}"
        return None

    def explain(self, waiting_in: str, timeout: float) -> str:
        """One sentence on which rank is missing; looks twice, some beats apart, to tell the silent from the slow."""
        failed = self.failure()
        if failed is not None:
            return f"rank {self._rank} waited for {waiting_in}, and {failed}"
        before = self._read_all()
        self._stopped.wait(SILENT_BEATS * BEAT_SECONDS)
        after = self._read_all()
        opening = f"rank {self._rank} waited for {waiting_in} (stall_timeout={timeout:g} s)"
        if not after:
            return (
                f"{opening}; rank 0, which keeps the store of the process group, cannot be reached: it has died or left"
            )
        silent = [rank for rank in range(self._world) if rank not in after or before.get(rank) == after[rank]]
        silent = [rank for rank in silent if rank != self._rank]
        if silent:
            rank = silent[0]
            seen = f"last seen at {after[rank].where}" if rank in after else "never seen"
            return f"{opening}; rank {rank} has died or left ({seen})"
        behind = min((post.operations, rank) for rank, post in after.items() if rank != self._rank)[1]
        ahead = [rank for rank, post in after.items() if post.operations > after[behind].operations]
        where = after[behind].where
        if not ahead:
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
    """A thread that comes back from the store when the interpreter is gone would be ended by C++, with the process."""
    watchdogs = list(_posting)
    for watchdog in watchdogs:
        watchdog.stop()
    latest = time.monotonic() + LEAVE_SECONDS
    for watchdog in watchdogs:
        watchdog._thread.join(max(0.0, latest - time.monotonic()))
