"""Ranks meet before a collective that perhaps not every rank makes, such as a read of a parameter in a log.

A collective that one rank makes alone would mix with the next collective of the others. So the ranks first meet in the
key-value store of the process group. If some rank does not come, the ranks that came are told so, and none goes on.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from .store import StoreError, server_of_the_store
from .watchdog import StallError, Watchdog

POLL_SECONDS = 0.001
LONGEST_POLL = 0.05
LOOK_SECONDS = 1.0
"""How often a waiting rank looks where the others are."""
ANSWER_SECONDS = 5.0
"""How long the store may take for one answer."""

Answer = TypeVar("Answer")


class Missing(NamedTuple):
    """A rank that did not come to a meeting."""

    rank: int
    where: str
    """Where the rank is, as far as it is known."""


class Meeting:
    """A place where the ranks of one group meet. Each meeting is about one thing."""

    def __init__(self, name: str, ranks: list[int], rank: int, watchdog: Watchdog) -> None:
        self._name, self._ranks, self._rank, self._watchdog = name, ranks, rank, watchdog
        self._count = 0

    def attend(self, subject: str, patience: float) -> Missing | None:
        """Waits for the other ranks. Returns a rank that did not come, the same verdict on all ranks that came.

        A rank is given up after ``patience`` seconds, and as soon as it is seen to have begun another collective.
        """
        if len(self._ranks) == 1:
            return None
        self._count += 1
        key = f"{self._name}/{self._count}"
        room = f"{key}/{zlib.crc32(subject.encode())}"
        self._ask(lambda store: (store.set(f"{key}/{self._rank}", subject), store.add(room, 1)))
        complete = self._wait(room, key, patience)
        # The first rank that knows decides for all. A rank may come while another one gives up.
        if self._ask(lambda store: store.add(f"{room}/voted", 1)) == 1:
            self._ask(lambda store: store.set(f"{room}/verdict", "go" if complete else "stop"))
        if self._verdict(f"{room}/verdict") == "go":
            return None
        return self._first_missing(key, subject)

    def _verdict(self, key: str) -> str:
        """Reads the verdict. The rank that decides may need a moment, or have died."""
        latest = time.monotonic() + ANSWER_SECONDS
        while not self._ask(lambda store: store.check([key])):
            if time.monotonic() > latest:
                raise StallError(f"rank {self._rank} waited for the verdict of a rank that has died or left")
            time.sleep(POLL_SECONDS)
        return self._ask(partial(_read, key))

    def _ask(self, call: Callable[[Any], Answer]) -> Answer:
        try:
            return self._watchdog.store.ask(call, ANSWER_SECONDS)
        except StoreError as error:
            state = "cannot be reached" if error.lost else "does not answer"
            raise StallError(f"rank {self._rank} waited to meet the others; {server_of_the_store()} {state}") from error

    def _wait(self, room: str, key: str, patience: float) -> bool:
        begin = look = time.monotonic()
        pause, suspects = POLL_SECONDS, set[int]()
        while self._ask(lambda store: store.add(room, 0)) < len(self._ranks):
            now = time.monotonic()
            if now - begin > patience or self._ask(lambda store: store.check([f"{room}/verdict"])):
                return False
            if now - look > LOOK_SECONDS:
                look = now
                ahead = {rank for rank in self._absent(key) if self._watchdog.is_ahead(rank)}
                if ahead & suspects:  # seen twice, so that its arrival cannot have been missed
                    return False
                suspects = ahead
            time.sleep(pause)
            pause = min(LONGEST_POLL, 2 * pause)
        return True

    def _absent(self, key: str) -> list[int]:
        return self._ask(lambda store: [rank for rank in self._ranks if not store.check([f"{key}/{rank}"])])

    def _first_missing(self, key: str, subject: str) -> Missing:
        for rank in self._absent(key):
            return Missing(rank, self._watchdog.place_of(rank))
        for rank in self._ranks:
            other = self._ask(partial(_read, f"{key}/{rank}"))
            if other != subject:
                return Missing(rank, other)
        late = next(rank for rank in self._ranks if rank != self._rank)
        return Missing(late, "the same place, too late")


def _read(key: str, store: Any) -> str:
    return str(store.get(key), "utf-8")
