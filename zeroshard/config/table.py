"""The table of extents and places: the whole idea of ZeRO (DESIGN: "One idea").

The runtime consults it; nothing else depends on the stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .offload import Offload


class Extent(Enum):
    """How much of a model state a rank keeps at rest."""

    WHOLE = "whole"
    SHARD = "shard"


class Place(Enum):
    """Where a model state lives."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class AtRest:
    """One row of the table: what a model state is between two uses, and where."""

    extent: Extent
    place: Place = Place.DEVICE


@dataclass(frozen=True)
class StateTable:
    """The configuration of ZeRO: three model states, two answers each."""

    optimizer: AtRest
    gradients: AtRest
    parameters: AtRest


def state_table(stage: int, world: int, offload: Offload | None = None) -> StateTable:
    """The row of extents that a stage stands for, and the row of places of an offload.

    A world of one has nothing to divide: every shard is the whole. But parameters that rest on the host come and go
    there too.

    >>> state_table(2, world=4).gradients.extent
    <Extent.SHARD: 'shard'>
    >>> state_table(2, world=4, offload=Offload()).optimizer.place
    <Place.HOST: 'host'>
    """
    states = Place.DEVICE if offload is None else Place.HOST
    parameters = Place.HOST if offload is not None and offload.parameters == "cpu" else Place.DEVICE

    def at_rest(from_stage: int, place: Place, comes_and_goes: bool = False) -> AtRest:
        divided = stage >= from_stage and (world > 1 or comes_and_goes)
        return AtRest(Extent.SHARD if divided else Extent.WHOLE, place)

    return StateTable(
        optimizer=at_rest(1, states),
        gradients=at_rest(2, states),
        parameters=at_rest(3, parameters, comes_and_goes=parameters is Place.HOST),
    )
