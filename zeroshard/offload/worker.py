"""A thread that does jobs one after the other, and reports its failure to everybody who waits.

The thread has references to its jobs and to nothing else of the model, so that a model that is not used can be freed.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

CLOSE_SECONDS = 30.0
"""How long a worker that is freed waits for the job that has begun."""
POLL_SECONDS = 0.5
"""How often a waiting thread checks whether the worker has failed."""


class OffloadError(RuntimeError):
    """The host's part of a step failed. The cause is attached. The model's state is undefined from then on."""


class _Queue:
    """The state that the thread and its owner share. The thread must not have a reference to its owner."""

    def __init__(self, title: str, tell: Callable[[str], None] | None) -> None:
        self.title, self.tell = title, tell
        self.changed = threading.Condition()
        self.jobs: deque[Callable[[], None]] = deque()
        self.given = 0
        self.done = 0
        self.closed = False
        self.error: BaseException | None = None


class Worker:
    """One thread, started with its first job. It calls ``prepare`` first, and ``tell`` if a job fails.

    >>> worker = Worker("example")
    >>> seen = []
    >>> worker.wait(worker.submit(lambda: seen.append(1)))
    >>> seen
    [1]
    """

    def __init__(
        self, name: str, prepare: Callable[[], None] | None = None, tell: Callable[[str], None] | None = None
    ) -> None:
        self._name = name
        self._queue = _Queue(f"the host's {name}", tell)
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._prepare = prepare

    def submit(self, job: Callable[[], None]) -> int:
        """Adds a job. Returns its number, for ``wait``."""
        self.check()
        queue = self._queue
        if self._thread is None:
            arguments, name = (queue, self._prepare), f"zeroshard {self._name}"
            self._thread = threading.Thread(target=_work, args=arguments, name=name, daemon=True)
            self._thread.start()
            weakref.finalize(self, _close, queue, self._thread, self._process)  # also when the interpreter ends
        with queue.changed:
            queue.jobs.append(job)
            queue.given += 1
            queue.changed.notify_all()
            return queue.given

    def wait(self, number: int | None = None) -> None:
        """Waits until a job is done, by default the last one. Raises if any job has failed."""
        queue = self._queue
        with queue.changed:
            target = queue.given if number is None else number
            queue.changed.wait_for(lambda: queue.done >= target or queue.error is not None)
        self.check()

    def has_done(self, number: int) -> bool:
        """Whether a job is done, so that ``wait`` would return at once or raise."""
        return self._queue.done >= number

    def fail(self, error: BaseException) -> None:
        """Makes everybody who waits raise, because the work they wait for will not come."""
        with self._queue.changed:
            self._queue.error = self._queue.error or error
            self._queue.changed.notify_all()

    def check(self) -> None:
        """Raises if a job has failed."""
        if os.getpid() != self._process:
            raise OffloadError("a forked process has no threads of its parent's; shard a model of its own there")
        error = self._queue.error
        if error is not None:
            raise OffloadError(
                f"the host's {self._name} failed ({type(error).__name__}: {error}), so parameters and optimizer states "
                "are undefined; start again from a checkpoint"
            ) from error


def _close(queue: _Queue, thread: threading.Thread, process: int) -> None:
    """Drops jobs that have not begun. Waits for the running job, because it uses memory that is about to be freed."""
    if os.getpid() != process:
        return
    with queue.changed:
        queue.closed = True
        if queue.jobs:
            queue.jobs.clear()
            queue.error = RuntimeError("it was closed before all was done")  # another worker may be waiting
        queue.changed.notify_all()
    if thread is not threading.current_thread():
        thread.join(CLOSE_SECONDS)


def _work(queue: _Queue, prepare: Callable[[], None] | None) -> None:
    if prepare is not None and not _succeeds(queue, prepare):
        return
    while True:
        with queue.changed:
            queue.changed.wait_for(lambda: bool(queue.jobs) or queue.closed)
            if not queue.jobs:
                return
            job = queue.jobs.popleft()
        if not _succeeds(queue, job):
            return
        del job  # otherwise the job's tensors would live until the next job comes
        with queue.changed:
            queue.done += 1
            queue.changed.notify_all()


def _succeeds(queue: _Queue, job: Callable[[], None]) -> bool:
    """Does a job. False if it raised: everybody who waits will raise, and the other ranks are told."""
    try:
        job()
    except BaseException as error:
        with queue.changed:
            queue.error = queue.error or error
            queue.jobs.clear()
            queue.changed.notify_all()
        if queue.tell is not None:
            queue.tell(f"{queue.title} failed ({type(error).__name__}: {error})")
        return False
    return True
