"""The key-value store of the process group, asked in a way that always ends in time.

Another process serves the store: rank 0, or torchrun's agent. If that process is frozen, a call of the store never
returns. So a thread of its own makes the calls, and whoever asks waits for an answer only so long.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

Answer = TypeVar("Answer")
_Reply = tuple[Any, Exception | None]


class StoreError(RuntimeError):
    """The store has not answered in time, or the connection to it is lost."""

    def __init__(self, text: str, *, lost: bool = False) -> None:
        super().__init__(text)
        self.lost = lost


class BoundedStore:
    """A connection to the store. Every call ends in time, whatever the process that serves the store does."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._calls: SimpleQueue[tuple[Callable[[Any], Any], SimpleQueue[_Reply]] | None] = SimpleQueue()
        self._unanswered: SimpleQueue[_Reply] | None = None
        """Where the answer to a call will come that took too long. Until it comes, nobody waits again."""
        self._thread: threading.Thread | None = None

    def ask(self, call: Callable[[Any], Answer], patience: float) -> Answer:
        """Calls ``call`` with the store, and returns its answer. Raises ``StoreError`` after ``patience`` seconds."""
        if self._unanswered is not None and self._unanswered.empty():
            raise StoreError("the store does not answer")
        self._unanswered = None
        reply: SimpleQueue[_Reply] = SimpleQueue()
        self._begin(call, reply)
        try:
            answer, error = reply.get(timeout=patience)
        except Empty:
            self._unanswered = reply
            raise StoreError(f"the store has not answered for {patience:g} s") from None
        if error is not None:
            raise StoreError(f"the store cannot be reached: {error}", lost=True) from error
        found: Answer = answer
        return found

    def tell(self, call: Callable[[Any], object]) -> None:
        """Makes a call, and does not wait for it. The call is left out while the store does not answer."""
        if self._calls.empty():
            self._begin(call, SimpleQueue())

    def stop(self, patience: float = 0.0) -> None:
        """Ends the thread, and waits for it at most so long. A thread that waits for the store is not waited for."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(patience if self._unanswered is None else 0.0)

    def _begin(self, call: Callable[[Any], object], reply: SimpleQueue[_Reply]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="zeroshard-store", daemon=True)
            self._thread.start()
        self._calls.put((call, reply))

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, reply = asked
            try:
                reply.put((call(self._store), None))
            except (RuntimeError, dist.DistError) as error:
                reply.put((None, error))


def served_by_rank_zero() -> bool:
    """Whether rank 0 serves the store. Else torchrun's agent does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)


def server_of_the_store() -> str:
    """Who serves the store, in words."""
    who = "rank 0" if served_by_rank_zero() else f"torchrun at {os.environ.get('MASTER_ADDR')}"
    return f"{who}, which has the store of the process group,"
