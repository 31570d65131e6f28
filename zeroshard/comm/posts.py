"""What every rank tells the others about itself: its progress, once a second, and what went wrong on it."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any, NamedTuple

from .store import BoundedStore, StoreError

BEAT_SECONDS = 1.0
"""How often a rank posts."""
READ_SECONDS = 2.0
"""How long a rank waits for the posts of the others."""


class Post(NamedTuple):
    """The last message of a rank about itself."""

    beat: int
    joint: int
    """How many collectives the rank has begun that all ranks make."""
    where: str
    """The collective that the rank began last."""
    call: str | None
    """The user's call that the rank is in."""
    calls: dict[str, int]
    """How many times the rank has begun each of the user's calls. The last one comes last."""


class Posts:
    """The posts of all ranks of one model, in the store."""

    def __init__(self, store: BoundedStore, rank: int, world: int, name: str) -> None:
        """``name`` is the same on all ranks, and belongs to no other model."""
        self.store, self._rank, self._world, self._name = store, rank, world, f"zeroshard/{name}"
        self._failed, self._began = f"{self._name}/failed", time.time()

    def post(self, post: Post) -> None:
        """Replaces this rank's last post. Does not wait."""
        text = json.dumps(post)
        self.store.tell(lambda store: store.set(f"{self._name}/{self._rank}", text))

    def read_all(self) -> dict[int, Post]:
        """The last post of each rank that has posted. Raises ``StoreError`` if the store does not answer."""
        keys = {rank: f"{self._name}/{rank}" for rank in range(self._world)}

        def read(store: Any) -> dict[int, Post]:
            return {rank: Post(*json.loads(store.get(key))) for rank, key in keys.items() if store.check([key])}

        return self.store.ask(read, READ_SECONDS)

    def read(self, rank: int) -> Post | None:
        """The last post of one rank. None if there is none. Raises ``StoreError`` if the store does not answer."""
        key = f"{self._name}/{rank}"
        return self.store.ask(lambda s: Post(*json.loads(s.get(key))) if s.check([key]) else None, READ_SECONDS)

    def fail(self, what: str) -> None:
        """Tells the other ranks what went wrong on this rank. The first failure of all ranks counts."""
        text = json.dumps((self._rank, what, time.time()))
        with suppress(StoreError):
            self.store.ask(lambda store: store.compare_set(self._failed, "", text), READ_SECONDS)

    def failure(self) -> str | None:
        """What went wrong on another rank, if that rank has called ``fail``. Raises ``StoreError`` without an answer.

        A failure from before this rank began is of an earlier try: a restarted job may have the same store.
        """
        found = self.store.ask(lambda s: s.get(self._failed) if s.check([self._failed]) else None, READ_SECONDS)
        if found is None:
            return None
        rank, what, when = json.loads(found)
        return None if rank == self._rank or when < self._began else f"rank {rank} failed: {what}"
