"""The key-value store of the process group, asked in a way that always ends in time.

Another process serves the store: rank 0, or torchrun's agent. If that process is frozen, a call of the store never
returns. So a thread of its own makes the calls, and whoever asks waits for an answer only so long.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class StoreError(RuntimeError):
    """The store has not answered in time, or the connection to it is lost."""

    def __init__(self, text: str, *, lost: bool = False) -> None:
        super().__init__(text)
        self.lost = lost


class BoundedStore:
    """A connection to the store. Every call ends in time, whatever the process that serves the store does."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._calls: SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None] = SimpleQueue()
        self._late: Future[Any] | None = None
        """The answer to a call that took too long. A later call waits for it first, within its own time."""
        self._thread: threading.Thread | None = None

    def ask(self, call: Callable[[Any], Answer], patience: float) -> Answer:
        """Calls ``call`` with the store, and returns its answer. Raises ``StoreError`` after ``patience`` seconds."""
        latest = time.monotonic() + patience
        late = self._late
        if late is not None:
            self._wait(late, latest)
            self._late = None
        answer: Future[Answer] = Future()
        self._enqueue(call, answer)
        self._wait(answer, latest)
        error = answer.exception()
        if error is not None:
            raise StoreError(f"the store cannot be reached: {error}", lost=True) from error
        return answer.result()

    def tell(self, call: Callable[[Any], object]) -> None:
        """Makes a call, and does not wait for it. The call is left out while the store does not answer."""
        if self._calls.empty():
            self._enqueue(call, Future())

    def stop(self, patience: float = 0.0) -> None:
        """Ends the thread, and waits for it at most so long. A thread that waits for the store is not waited for."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(patience if self._late is None else 0.0)

    def _wait(self, answer: Future[Any], latest: float) -> None:
        try:
            answer.exception(max(0.0, latest - time.monotonic()))
        except TimeoutError:
            self._late = answer
            raise StoreError("the store does not answer") from None

    def _enqueue(self, call: Callable[[Any], object], answer: Future[Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="zeroshard-store", daemon=True)
            self._thread.start()
        self._calls.put((call, answer))

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, answer = asked
            try:
                answer.set_result(call(self._store))
            except Exception as error:  # whoever asked is told
                answer.set_exception(error)


def served_by_rank_zero() -> bool:
    """Whether rank 0 serves the store. Else torchrun's agent does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)


def server_of_the_store() -> str:
    """Who serves the store, in words."""
    who = "rank 0" if served_by_rank_zero() else f"torchrun at {os.environ.get('MASTER_ADDR')}"
    return f"{who}, which has the store of the process group,"
