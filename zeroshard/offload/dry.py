"""The host's side of a dry run: jobs run in a fixed order, and nothing is computed.

Buffers have shapes and no values. Gradients wait on the device as long as is possible in a real run, so that the peak
of a dry run is the peak of a run with the slowest copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from .kernel import Pool, Segment, Segments
from .library import Choice, Simd
from .rules import Rule
from .worker import Worker


class DryWorker(Worker):
    """Has no thread: a job runs when someone waits for it, or when more than ``patience`` jobs came after it.

    >>> worker, seen = DryWorker("example", patience=1), []
    >>> first, second = (worker.submit(lambda number=number: seen.append(number)) for number in (1, 2))
    >>> seen
    [1]
    >>> worker.wait(second)
    >>> seen
    [1, 2]
    """

    def __init__(self, name: str, patience: int) -> None:
        super().__init__(name)
        self._patience = patience
        self._jobs: deque[Callable[[], None]] = deque()
        self._done = 0

    def submit(self, job: Callable[[], None]) -> int:
        self._jobs.append(job)
        while len(self._jobs) > self._patience:
            self._run_next()
        return self._done + len(self._jobs)

    def wait(self, number: int | None = None) -> None:
        target = self._done + len(self._jobs) if number is None else number
        while self._done < target:
            self._run_next()

    def has_done(self, number: int) -> bool:
        return self._done >= number

    def check(self) -> None:
        """Runs all jobs: a thread that checks for failures is about to wait for them."""
        self.wait()

    def _run_next(self) -> None:
        job = self._jobs.popleft()
        self._done += 1  # before the job runs, because a job may wait for others
        job()


class DryPool(Pool):
    """Has the methods of the kernel's pool, and computes nothing."""

    def __init__(self) -> None:
        self.threads, self.choice = 0, Choice(Simd.PORTABLE, "a dry run")

    def prepare(self, segments: Sequence[Segment]) -> Segments:
        return Segments(segments, b"")

    def update(self, work: Sequence[tuple[Segments, Sequence[Rule]]], factor: float, seed: int = 0) -> None:
        pass

    def accumulate(self, total: Tensor, gradient: Tensor, *, first: bool) -> None:
        pass

    def square_sum(self, values: Tensor) -> float:
        return 0.0
