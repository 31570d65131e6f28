"""How much ranks communicate: elements, bytes and calls by kind of collective."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Collective(Enum):
    """The operations that count as volume."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


class Traffic(NamedTuple):
    """What one kind of collective moved.

    A collective counts the elements of the whole flat, whatever the number of ranks. An all-reduce counts them twice.
    """

    elements: int = 0
    """Elements of the flats that it moved; an all-reduce counts them twice."""
    bytes: int = 0
    """Bytes of these elements."""
    calls: int = 0
    """How often it was called."""


class RankVolume(NamedTuple):
    """What one rank moved in a step, by kind of collective."""

    shards: dict[str, Traffic]
    """Among the ranks that divide the states."""
    replicas: dict[str, Traffic]
    """Between replicas. Empty unless a mesh makes replicas."""
    model: dict[str, Traffic]
    """Among tensor-parallel ranks, by zeroshard. What DTensors move is not counted here."""


class Meter:
    """Counts traffic by kind of collective."""

    def __init__(self) -> None:
        self.counts: dict[str, Traffic] = {}

    def count(self, kind: Collective, numel: int, itemsize: int) -> None:
        old = self.counts.get(kind.value, Traffic())
        numel *= 2 if kind is Collective.ALL_REDUCE else 1
        self.counts[kind.value] = Traffic(old.elements + numel, old.bytes + numel * itemsize, old.calls + 1)

    def take(self) -> dict[str, Traffic]:
        """Returns the counts and begins anew."""
        counts, self.counts = self.counts, {}
        return counts
