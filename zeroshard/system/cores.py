"""Which cores the host optimizer's threads of this rank may use.

torchrun sets OMP_NUM_THREADS=1 to keep ranks from crowding each other; taking that for an answer would leave most of
the memory's bandwidth unused. So cores are counted, and divided among the ranks of this machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from . import machine


@dataclass(frozen=True)
class Share:
    """This rank's part of the machine."""

    threads: int
    cores: tuple[int, ...]
    """One for each thread to be bound to; empty where they should float."""


def share(threads: int | None = None) -> Share:
    """As many threads as asked for, or as this rank has cores: those allowed, divided by the ranks on this machine."""
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ValueError(f"threads={threads!r} must be a whole number, at least 1")
    allowed = sorted(os.sched_getaffinity(0))
    usable = machine.usable_cores()
    ranks = max(1, _variable("LOCAL_WORLD_SIZE", 1))
    rank = _variable("LOCAL_RANK", 0) % ranks
    mine = allowed[rank * len(allowed) // ranks : (rank + 1) * len(allowed) // ranks]
    count = threads or max(1, usable // ranks)
    # Bound only where every thread has a core of its own. A quota is no right to certain cores: containers that each
    # took the first ones would crowd those.
    exact = usable == len(allowed) and count <= len(mine)
    return Share(count, tuple(mine[:count]) if exact else ())


def _variable(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else default
