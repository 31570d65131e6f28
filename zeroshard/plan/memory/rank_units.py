"""The units of a model on one rank: the rank's range of every flat, and which states are on the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import NamedTuple

from ...config.table import Extent, state_table
from ...offload.place import stay_on_device, stay_within
from ..model.units import FlatShape, UnitShape
from ..setup import Setup

FP32 = 4
"""Bytes of one element of accumulators and moments."""


class RankFlat(NamedTuple):
    """A flat on one rank; sizes in elements."""

    shape: FlatShape
    whole: int
    shard: int
    own: int
    """Elements of the range that this rank updates."""
    on_host: bool
    """True if the optimizer states of this flat are on the host."""


class RankUnit(NamedTuple):
    """A unit on one rank."""

    number: int
    """Its place among all units; 0 is the root."""
    block: int
    flats: tuple[RankFlat, ...]

    @property
    def trained(self) -> list[RankFlat]:
        return [flat for flat in self.flats if flat.shape.trained]

    @property
    def whole(self) -> int:
        return sum(flat.whole for flat in self.flats)


def place(setup: Setup, units: Sequence[UnitShape]) -> list[RankUnit]:
    """Gives every flat of a rank its range, and its optimizer states a place."""
    table, world = state_table(setup.stage, setup.world, setup.offload), setup.world
    divided = table.optimizer.extent is Extent.SHARD

    def own(flat: FlatShape) -> int:
        return flat.shard(world) if divided else flat.numel(world)

    @cache  # most units are equal, so this is computed once
    def sizes(flats: tuple[FlatShape, ...]) -> list[int]:
        return [own(flat) if flat.trained else 0 for flat in flats]

    @cache
    def placed(flats: tuple[FlatShape, ...], stays: tuple[bool, ...]) -> tuple[RankFlat, ...]:
        return tuple(
            RankFlat(flat, flat.numel(world), flat.shard(world), own(flat), flat.trained and not here)
            for flat, here in zip(flats, stays, strict=True)
        )

    stays = iter(_stay(setup, [size for unit in units for size in sizes(unit.flats)], units))
    return [
        RankUnit(number, unit.block, placed(unit.flats, tuple(islice(stays, len(unit.flats)))))
        for number, unit in enumerate(units)
    ]


def host_share(units: Sequence[RankUnit]) -> float:
    """The share of the elements updated by this rank whose states are on the host."""
    trained = [flat for unit in units for flat in unit.trained]
    return sum(flat.own for flat in trained if flat.on_host) / sum(flat.own for flat in trained)


def _stay(setup: Setup, sizes: Sequence[int], units: Sequence[UnitShape]) -> list[bool]:
    """For each flat, whether its optimizer states stay on the device."""
    offload = setup.offload
    if offload is None:
        return [True] * len(sizes)
    if offload.host_fraction != "auto":
        return stay_on_device(sizes, offload.host_fraction)
    if offload.device_memory is None:  # the start of the job decides, by the memory that is free then
        return [False] * len(sizes)
    sharded = state_table(setup.stage, setup.world, offload).parameters.extent is Extent.SHARD
    elements = sum(
        flat.shard(setup.world) if sharded else flat.numel(setup.world) for unit in units for flat in unit.flats
    )
    room = offload.device_memory - setup.width * elements
    return stay_within(sizes, setup.width + setup.master_width + 2 * FP32, max(room, 0))
