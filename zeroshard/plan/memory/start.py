"""The memory of one rank while ``shard()`` puts first values into flats (``init/materialise.py``), unit by unit."""

from __future__ import annotations

from collections.abc import Sequence

from ...offload.host_buffers import SLICE
from ..setup import Setup
from .device_memory import DeviceMemory
from .rank_units import RankFlat, RankUnit

ROUNDING, DIVIDING = 8, 12
"""Bytes an element of a slice that is rounded to bf16, and of one whose low half is taken."""


def most_at_start(setup: Setup, units: Sequence[RankUnit], rest: DeviceMemory, *, sharded: bool) -> int:
    """The most bytes that are alive at a time. ``rest``: the memory between steps, of which moments come later."""
    first = setup.first_values
    assert first is not None
    whole = sum(unit.whole for unit in units)
    present, width = first.present / max(1, whole), first.initialised
    root = units[0]
    # The root's values stay whole until the last initialiser is done. Values that are there already come in order.
    order = [*units[1:], root] if width else units
    left, done, most = float(first.present), float(rest.buffers), 0.0
    for unit in order:
        opened = width * (unit.whole + (root.whole if unit is not root else 0))
        for flat in unit.flats:
            stays = _staying(setup, flat, sharded=sharded)
            most = max(most, done + left + opened + stays + _passing(setup, flat, sharded=sharded))
            done += stays
            left -= present * flat.whole
    return int(most)


def _staying(setup: Setup, flat: RankFlat, *, sharded: bool) -> int:
    """Bytes of a flat that stay on the device: parameters and master."""
    on_host = setup.offload is not None and setup.offload.parameters == "cpu"
    filled = on_host or (setup.cast_on_gather and flat.shape.trained)
    parameters = 0 if filled else setup.width * (flat.shard if sharded else flat.whole)
    return parameters + (setup.master_width * flat.own if flat.shape.trained and not flat.on_host else 0)


def _passing(setup: Setup, flat: RankFlat, *, sharded: bool) -> int:
    """Bytes that a flat needs while its values move in, beyond those that stay."""
    master = setup.master_width if flat.shape.trained else 0
    from_initialisers = setup.first_values is not None and setup.first_values.initialised == (master or setup.width)
    values = 0 if from_initialisers else (master or setup.width) * flat.whole
    own = (master or setup.width) * flat.shard if sharded else 0  # a copy of this rank's part of the values
    gathered = setup.width * flat.whole if sharded else 0  # its memory is taken once, and given back
    at_rest = flat.shard if sharded else flat.whole
    if not flat.on_host:
        return values + own + gathered - (master * at_rest if flat.own == at_rest else 0)  # they become the master
    assert setup.offload is not None
    dividing = DIVIDING if setup.offload.split_master else ROUNDING
    moving = max(ROUNDING * min(SLICE, at_rest), setup.width * flat.own + dividing * min(SLICE, flat.own))
    return values + own + gathered + moving
