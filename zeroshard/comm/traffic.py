"""The operations that count as volume, and their count."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from torch import Tensor


class Collective(Enum):
    """The operations that count as volume."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


class Traffic(NamedTuple):
    """What one kind of collective moved: elements of the flats, whatever the number of ranks; all-reduce twice."""

    elements: int = 0
    bytes: int = 0
    calls: int = 0


@dataclass
class Meter:
    """Counts traffic by collective."""

    counts: dict[str, Traffic] = field(default_factory=dict)

    def add(self, kind: Collective, tensor: Tensor) -> None:
        self.count(kind, tensor.numel(), tensor.element_size())

    def count(self, kind: Collective, numel: int, itemsize: int) -> None:
        old = self.counts.get(kind.value, Traffic())
        numel *= 2 if kind is Collective.ALL_REDUCE else 1
        self.counts[kind.value] = Traffic(old.elements + numel, old.bytes + numel * itemsize, old.calls + 1)

    def take(self) -> dict[str, Traffic]:
        counts, self.counts = self.counts, {}
        return counts
