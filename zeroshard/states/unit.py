"""A unit: the parameters that are gathered, reduced and updated together, in one flat or several."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from ..comm import parallel
from ..comm.fabric import Fabric
from ..config.layout import ROOT_TITLE, UnitSpec, divide_into_flats
from ..config.options import Precision
from ..config.table import StateTable
from ..shown.placeholder import Placeholders
from ..system import compat
from .flat import Flat, Presence


class Graph:
    """A mark in the nodes of one of autograd's graphs. It is gone when the graph is gone."""


class Unit:
    """The parameters that are gathered, reduced and updated together, and the module whose calls they follow."""

    def __init__(
        self,
        spec: UnitSpec,
        *,
        table: StateTable,
        precision: Precision,
        max_bytes: int,
        fabric: Fabric,
        placeholders: Placeholders,
    ) -> None:
        self.name = spec.name
        self.title = spec.name or ROOT_TITLE
        self.module = spec.module
        itemsize = precision.parameters.itemsize if precision.parameters is not None else None
        groups = divide_into_flats(
            spec.parameters, max_bytes, itemsize, numel=parallel.share_numel, divided=parallel.divided
        )
        self.flats = [
            Flat(
                self.title if len(groups) == 1 else f"{self.title}#{number}",
                members,
                table=table,
                precision=precision,
                fabric=fabric,
                placeholders=placeholders,
            )
            for number, members in enumerate(groups)
        ]
        self.open_blocks = 0
        """How many ``gathered`` blocks are open. The unit stays present meanwhile."""
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        """Graphs in which user code used parameters. The unit stays present until their backward is over."""

    @property
    def trainable_flats(self) -> list[Flat]:
        return [flat for flat in self.flats if flat.trainable]

    @property
    def numel(self) -> int:
        return sum(flat.layout.numel for flat in self.flats)

    @property
    def sharing(self) -> int:
        """How many tensors share the memory of the parameters. The number grows if somebody stores a view."""
        return sum(compat.storage_uses(flat.whole) for flat in self.flats)

    @property
    def under_way(self) -> bool:
        """Whether the parameters are present, or their gather has begun."""
        return all(flat.presence is not Presence.RELEASED for flat in self.flats)

    @property
    def present(self) -> bool:
        return all(flat.present for flat in self.flats)

    def gather(self) -> None:
        for flat in self.flats:
            flat.gather()

    def prefetch(self) -> None:
        for flat in self.flats:
            flat.prefetch()

    def wait(self, *, watched: bool = False) -> None:
        for flat in self.flats:
            flat.wait(watched=watched)

    def watch(self) -> None:
        for flat in self.flats:
            flat.watch()

    def unwatch(self) -> None:
        for flat in self.flats:
            flat.unwatch()

    def release(self) -> None:
        if self.open_blocks == 0 and not self.graphs:
            for flat in self.flats:
                flat.release()


def check_no_block_open(units: Iterable[Unit], doing: str) -> None:
    """Raises inside a ``gathered`` block: an update would change parameters that the block shows."""
    for unit in units:
        if unit.open_blocks:
            raise RuntimeError(
                f"{doing} inside `with zeroshard.gathered(...)`, which shows {unit.title!r}; leave the block first"
            )
