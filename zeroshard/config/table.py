"""The table of extents and places: the whole idea of ZeRO (DESIGN: "One idea").

The runtime consults this table. Nothing else depends on the stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .offload import Offload


class Extent(Enum):
    """How much of a model state a rank has at rest."""

    WHOLE = "whole"
    SHARD = "shard"


class Place(Enum):
    """Where a model state lives."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True)
class AtRest:
    """One row of the table: how much of a model state a rank has between two uses, and where."""

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

    In a world of one rank every shard is the whole, so nothing is divided. The exception: parameters that rest on the
    host are gathered and released on one rank too.

    >>> state_table(2, world=4).gradients.extent
    <Extent.SHARD: 'shard'>
    >>> state_table(2, world=4, offload=Offload()).optimizer.place
    <Place.HOST: 'host'>
    """
    states = Place.DEVICE if offload is None else Place.HOST
    parameters = Place.HOST if offload is not None and offload.parameters == "cpu" else Place.DEVICE

    def at_rest(from_stage: int, place: Place, always: bool = False) -> AtRest:
        divided = stage >= from_stage and (world > 1 or always)
        return AtRest(Extent.SHARD if divided else Extent.WHOLE, place)

    return StateTable(
        optimizer=at_rest(1, states),
        gradients=at_rest(2, states),
        parameters=at_rest(3, parameters, always=parameters is Place.HOST),
    )
