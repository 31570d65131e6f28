"""Knows what this rank does, and explains a stall: which rank is missing, and which call only some ranks make.

Every rank posts its last collective and the user's call that it belongs to once a second (``posts``). A rank whose
collective stalls reads the posts of all ranks, and raises an error that names the missing rank. ``lookout`` has the
threads that post, and that end collectives which would never end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch.distributed as dist

from . import posts as posting
from .posts import Post, Posts
from .store import BoundedStore, StoreError, served_by_rank_zero, server_of_the_store

SILENT_BEATS = 3
"""A rank that has not posted for so many beats counts as dead."""
READ_BEATS = 2
"""Every rank has read a failure after so many beats. Until then, rank 0 must not end if it serves the store."""
FORWARD = "a forward"
EVALUATION = "a forward without gradients, as in evaluation or generate()"
BACKWARD = "a backward"


class StallError(RuntimeError):
    """A collective did not complete. The message names the missing rank, and where it was last seen."""


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
    """Remembers this rank's progress, and explains a stall from the posts of all ranks."""

    def __init__(self, posts: Posts, rank: int, world: int, timeout: float) -> None:
        self.posts, self.rank, self.world, self.timeout = posts, rank, world, timeout
        self.joint, self.where = 0, "the start"
        """How many joint collectives this rank has begun, and the last collective of any kind (``Post``)."""
        self._beat = 0
        self._pass: str | None = None
        """The forward or backward that runs. An exception may have ended it."""
        self._call: str | None = None
        """The other call that runs: of a function, say. It may be inside a forward."""
        self._calls: dict[str, int] = {}
        self.broken: str | None = None
        """Why a collective did not complete. The ranks no longer know which data has arrived where."""
        self.stopped = threading.Event()

    @property
    def store(self) -> BoundedStore:
        """The store that the ranks post to."""
        return self.posts.store

    def note(self, where: str, *, joint: bool = True) -> None:
        """Remembers the collective that this rank begins, for the next post. ``joint``: all ranks make it."""
        self.joint += joint
        self.where = where

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

    def post(self) -> None:
        """Posts this rank's progress. Does not wait."""
        self._beat += 1
        call = self._call or self._pass
        self.posts.post(Post(self._beat, self.joint, self.where, call, dict(self._calls)))

    def fail(self, what: str) -> None:
        """Tells the other ranks what went wrong on this rank. Any thread may call this."""
        self.posts.fail(what)

    def place_of(self, rank: int) -> str:
        """Where another rank was when it last posted."""
        with suppress(StoreError):
            post = self.posts.read(rank)
            return "nowhere: it has never posted" if post is None else post.where
        return "a place that the store does not tell"

    def is_ahead(self, rank: int) -> bool:
        """Whether another rank has begun a collective that this rank has not come to."""
        with suppress(StoreError):
            post = self.posts.read(rank)
            return post is not None and post.joint > self.joint
        return False

    # -- stalls ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises if a collective of this model has failed before."""
        if self.broken is not None:
            raise StallError(f"{self.broken} (no collective is possible since an earlier one failed)")

    def break_off(self, why: str) -> None:
        """Refuses all later collectives of this model, so that no rank uses data that did not arrive."""
        self.broken = self.broken or why

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
            self.raise_stall(operation, error)
            raise

    def raise_stall(self, operation: str, error: BaseException) -> None:
        """Raises the error that names rank and operation, if the given error is the backend's."""
        if not isinstance(error, StallError) and _is_of_the_backend(error):
            self.check()  # the thread has aborted this collective, and knows why
            self.break_off(f"{self.explain(operation)} (the backend said: {error})")
            raise StallError(self.broken) from error

    def explain(self, waiting_in: str) -> str:
        """Names the call that waited, the missing rank and where it is, then the collective. All ranks name one rank.

        The first rank that explains a stall tells the others. This rank ends, too, and a rank that comes late would
        else find this rank missing, or the store gone.
        """
        opening = f"rank {self.rank} waited for {waiting_in}"
        try:
            failed = self.posts.failure()
            if failed is None:
                explained = self._look_for_missing(opening)
                self.fail(explained)
                failed = self.posts.failure()  # another rank may have been faster
        except StoreError as error:
            state = "cannot be reached: it has died or left" if error.lost else "does not answer: it is stopped"
            return self._in_words(None, f"{self._timed(opening)}; {server_of_the_store()} {state}")
        if self.rank == 0 and served_by_rank_zero():
            self.stopped.wait(READ_BEATS * posting.BEAT_SECONDS)
        return explained if failed is None else f"{opening}, and {failed}"

    def _look_for_missing(self, opening: str) -> str:
        """Reads all posts twice, some beats apart: the post of a slow rank changes, that of a dead rank does not."""
        before = self.posts.read_all()
        self.stopped.wait(SILENT_BEATS * posting.BEAT_SECONDS)
        return self._compare(self._timed(opening), before, self.posts.read_all())

    def _timed(self, opening: str) -> str:
        return f"{opening} (stall_timeout={self.timeout:g} s)"

    def _compare(self, opening: str, before: dict[int, Post], after: dict[int, Post]) -> str:
        """The explanation from two readings of the posts."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        for rank in others:
            if rank not in after:
                return self._in_words(None, f"{opening}; rank {rank} has died or left, or is stopped (never seen)")
            if before.get(rank) == after[rank]:
                details = f"{opening}; rank {rank} has died or left, or is stopped (last seen at {after[rank].where})"
                return self._in_words(_Other(rank, after[rank], gone=True), details)
        behind = min(others, key=lambda rank: after[rank].joint)
        where, other = after[behind].where, _Other(behind, after[behind], gone=False)
        if all(post.joint <= after[behind].joint for post in after.values()):
            details = f"{opening}; rank {behind} is alive, at {where}, and did not join"
        else:
            details = f"{opening}; rank {behind} is alive but behind: its last collective was {where}"
        return self._in_words(other, details)

    def _in_words(self, other: _Other | None, details: str) -> str:
        """The explanation in the words of the user's program, followed by the details of the collective."""
        call = self._call or self._pass
        if call is None:
            return details
        sentences = [f"rank {self.rank} waited in {call}, which is collective: every rank must make it"]
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
            f"{call} ({self._calls.get(call, 0)} on rank {self.rank}, {theirs.get(call, 0)} on rank {other.rank})"
            for call in {**self._calls, **theirs}
            if self._calls.get(call, 0) != theirs.get(call, 0)
        ]
        return f"the ranks have not made the same calls so far: {', '.join(found)}" if found else None


def _is_of_the_backend(error: BaseException) -> bool:
    """Whether the backend raised an error. Gloo raises plain RuntimeErrors, which are known by their text."""
    signs = ("gloo", "timed out")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)
    )
