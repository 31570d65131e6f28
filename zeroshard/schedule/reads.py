"""Values for user code that uses a parameter between the passes of the model: in a log, an average, a loss.

Where parameters are whole at rest, this rank waits for the updates under way and answers alone. Where they are shards
(stage 3), the read is a collective: all ranks make it, and the whole unit is gathered.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from ..comm.fabric import Fabric
from ..comm.watchdog import StallError
from ..shown.absent import Use
from ..states.flat import SLEEPING, Flat, Presence
from ..states.unit import Graph, Unit
from ..system import compat
from ..system.callers import user_level
from ..system.sizes import size_text
from .lifetimes import Lifetimes

PATIENCE = 10.0
"""Seconds after which a read raises if some rank does not make it."""

BLOCK = "`with zeroshard.gathered(model):` on all ranks"
WRITING_BLOCK = "`with zeroshard.gathered(model, write=True):` on all ranks"

LOADING = "load_state_dict()"
"""The use of a parameter whose value is about to be replaced."""


class Reads:
    """The reader of one model (``shown.absent.Reader``)."""

    def __init__(self, units: Sequence[Unit], lifetimes: Lifetimes, fabric: Fabric, *, refuse: bool) -> None:
        self._lifetimes, self._fabric, self._refuse = lifetimes, fabric, refuse
        self._unit_of = {flat: unit for unit in units for flat in unit.flats}
        self._warned = False
        for flat in self._unit_of:
            flat.reader = self

    def bring(self, use: Use) -> None:
        with compat.outside_transforms():
            self._bring(use)

    def _bring(self, use: Use) -> None:
        for flat in _flats(use):
            if flat.presence is Presence.ASLEEP:
                raise RuntimeError(f"{use.function} needs the value of parameter {use.names[0]!r}, and {SLEEPING}")
            self._check_lasts(flat, use)
            self._wait_if_whole(flat, use)
        units = self._units(use)
        if units:
            self._bring_units(units, use)
        for flat in _flats(use):
            if use.shows_data or not flat.sharded:
                flat.lend(data=use.shows_data)

    def used_in_graph(self, use: Use, nodes: Iterable[Any]) -> None:
        graph = Graph()
        for node in nodes:
            node.metadata.setdefault("zeroshard.graphs", []).append(graph)
        self._lifetimes.stay_for_graph(self._units(use), graph)

    def _units(self, use: Use) -> list[Unit]:
        """The units that must be gathered."""
        return list(dict.fromkeys(self._unit_of[flat] for flat in _flats(use) if flat.sharded))

    def _check_lasts(self, flat: Flat, use: Use) -> None:
        """Raises if a write to these parameters would be lost."""
        if flat in use.written and not flat.takes_writes:
            why = "divided among the ranks" if flat.sharded else "a copy of a master"
            raise RuntimeError(
                f"{use.function} would write to parameter {use.names[0]!r}, which is {why}, so the write would be "
                f"lost; write inside {WRITING_BLOCK}"
            )

    def _wait_if_whole(self, flat: Flat, use: Use) -> None:
        try:
            flat.wait_if_whole()
        except StallError as error:
            raise StallError(
                f"{use.function} needs the value of parameter {use.names[0]!r}, whose update has not come from all "
                "ranks: it comes with the next forward of all ranks; before a read on one rank alone, call "
                f"zeroshard.synchronize(model) on all ranks. In detail: {error}"
            ) from error

    def _bring_units(self, units: list[Unit], use: Use) -> None:
        names = f"parameter {use.names[0]!r}"
        if self._refuse:
            raise RuntimeError(
                f'{use.function} needs the value of {names}, which is divided among the ranks (reads="raise"); '
                f"{_remedy(use)}"
            )
        released = [unit for unit in units if not unit.under_way]
        with self._fabric.watchdog.during("a read of a parameter"):
            if released:
                self._meet(released, names, use)
                self._warn(released, names, use)
            self._lifetimes.read(units)

    def _meet(self, units: list[Unit], names: str, use: Use) -> None:
        patience = min(PATIENCE, self._fabric.stall_timeout)
        missing = self._fabric.meeting.attend(", ".join(unit.title for unit in units), patience)
        if missing is not None:
            raise RuntimeError(
                f"{use.function} needs the value of {names}, which is divided among the ranks (stage 3), so all ranks "
                f"must do this, and rank {missing.rank} did not (it is at {missing.where}); {_remedy(use)}"
            )

    def _warn(self, units: list[Unit], names: str, use: Use) -> None:
        if self._warned or self._fabric.rank > 0 or self._fabric.shards == 1 or use.function == LOADING:
            return
        self._warned = True
        size = sum(flat.layout.numel * flat.dtype.itemsize for unit in units for flat in unit.flats)
        titles = ", ".join(repr(unit.title) for unit in units[:3])
        warnings.warn(
            f"{use.function} used {names}, which is divided among the ranks (stage 3): all ranks gathered {titles} "
            f"({size_text(size)}) for it. The value is right, but every such read costs a collective; {BLOCK} gathers "
            'all parameters at once, and shard(..., reads="raise") refuses such reads',
            stacklevel=user_level(),
        )


def _remedy(use: Use) -> str:
    if use.function == LOADING:
        return f"load inside {WRITING_BLOCK}"
    if use.function == "detach()":  # state_dict() detaches each parameter
        return (
            f"read inside {BLOCK}, or in the place of state_dict() call zeroshard.full_state_dict(model) on all ranks"
        )
    return f"read inside {BLOCK}"


def _flats(use: Use) -> list[Flat]:
    return [source for source in use.sources if isinstance(source, Flat)]
