"""The host's side of a dry run: buffers that have shapes and no values, jobs in a fixed order, and nothing to compute.

Gradients wait on the device as long as they ever could, so that a dry run's peak is that of the slowest copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from .kernel import Batch, Pool
from .library import Choice, Simd
from .segment import Segment
from .worker import Worker


class DryWorker(Worker):
    """Does jobs on the thread that waits for them, each when more than ``patience`` have come after it.

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

    def check(self) -> None:
        """Whoever looks after a worker waits for it."""
        self.wait()

    def _run_next(self) -> None:
        job = self._jobs.popleft()
        self._done += 1  # before: a job may have others done
        job()


class DryPool(Pool):
    """Takes what the kernel takes, and leaves it."""

    def __init__(self) -> None:
        self.threads, self.choice = 0, Choice(Simd.PORTABLE, "a dry run")

    def prepare(self, segments: Sequence[Segment]) -> Batch:
        return _DryBatch(self, segments)

    def accumulate(self, total: Tensor, gradient: Tensor, factor: float = 1.0, *, first: bool) -> None:
        pass

    def square_sum(self, values: Tensor) -> float:
        return 0.0

    def close(self) -> None:
        pass

    def run_packed(self, segments: bytes, rules: bytes, count: int, factor: float, seed: int) -> None:
        pass


class _DryBatch(Batch):
    def __init__(self, pool: Pool, segments: Sequence[Segment]) -> None:
        self.pool, self.packed = pool, b""
        self._segments = tuple(segments)
        self._moments = [len(segment.moments) for segment in segments]
