"""Which cores the host optimizer's threads of this rank may use.

torchrun sets OMP_NUM_THREADS=1, so that ranks do not compete for cores. With one thread, most of the memory's bandwidth
would be unused. So this module counts the cores, and divides them among the ranks of this machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from . import machine

MOST_THREADS = 4096
"""No machine can use more threads. ``native/library.cpp`` has the same bound."""
THREADS_OF_A_PROCESSOR = 4
"""More threads than this only wait for each other."""


@dataclass(frozen=True)
class Share:
    """This rank's part of the machine."""

    threads: int
    cores: tuple[int, ...]
    """One core for each thread to be bound to; empty if threads are not bound."""


def share(threads: int | None = None) -> Share:
    """This rank's threads and cores. By default one thread for each usable core, divided by the ranks here."""
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise ValueError(f"threads={threads!r} must be a whole number, at least 1")
    processors = os.cpu_count() or 1
    most = min(MOST_THREADS, THREADS_OF_A_PROCESSOR * processors)
    if threads is not None and threads > most:
        raise ValueError(f"threads={threads} must be at most {most}: this machine has {processors} processors")
    allowed = sorted(os.sched_getaffinity(0))
    usable = machine.usable_cores()
    ranks = max(1, _variable("LOCAL_WORLD_SIZE", 1))
    rank = _variable("LOCAL_RANK", 0) % ranks
    mine = allowed[rank * len(allowed) // ranks : (rank + 1) * len(allowed) // ranks]
    count = threads or max(1, usable // ranks)
    # Threads are bound only if each has a core of its own. With a quota they are not bound: several containers would
    # all take the first cores.
    exact = usable == len(allowed) and count <= len(mine)
    return Share(count, tuple(mine[:count]) if exact else ())


def _variable(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else default
