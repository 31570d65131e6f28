"""What tensor parallelism moves: torch's functional collectives, which DTensors issue, counted as ours are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..system import compat
from .traffic import Collective, Meter


@contextmanager
def count_functional() -> Iterator[Meter]:
    """Inside, counts what DTensors communicate on this rank, in forward and backward, by kind.

    Elements are those of the whole tensor, an all-reduce twice, as in ``zeroshard.stats``. For tests and reports: every
    operation of torch goes through Python meanwhile.
    """
    meter = Meter()
    kinds = {kind.value: kind for kind in Collective}

    def see(name: str, elements: int, itemsize: int) -> None:
        kind = next((kind for prefix, kind in kinds.items() if name.startswith(prefix)), None)
        if kind is not None:
            meter.count(kind, elements, itemsize)

    with compat.watch_functional_collectives(see):
        yield meter
