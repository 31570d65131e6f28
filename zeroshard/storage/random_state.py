"""The random number generators of one rank: read, and set again.

Ranks that divide a model (tensor parallelism) commonly draw the same numbers: a tensor that each of them has whole
must be the same on all, such as the mask of a dropout between their matrices. So if the run that loads arranges its
ranks differently than the saved run, all ranks that have the same part of the data get one state.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..comm.fabric import Fabric


class Seat(NamedTuple):
    """The place of a rank among all ranks."""

    data: int
    """The part of the data that the rank has."""
    model: int
    """The part of the model that the rank has."""
    degree: int
    """Degree of tensor parallelism: the number of parts of the model."""

    @classmethod
    def of(cls, fabric: Fabric) -> Seat:
        return cls(fabric.data_rank, fabric.model.rank, fabric.model.world)


class Predecessor(NamedTuple):
    """The rank of the saved run whose state a rank of this run takes."""

    rank: int
    new: bool
    """True if that run had no rank with this part of the data: then the state only gives a seed."""
    rearranged: bool
    """True if that run had another number of ranks, or divided the model otherwise."""


def predecessor_of(mine: Seat, world: int, saved: Sequence[Seat]) -> Predecessor:
    """Finds the predecessor of a rank in a run of ``world`` ranks."""
    if len(saved) == world and mine in saved:
        return Predecessor(saved.index(mine), new=False, rearranged=False)
    first = {seat.data: rank for rank, seat in reversed(list(enumerate(saved))) if seat.model == 0}
    found = first.get(mine.data)
    return Predecessor(first.get(0, 0) if found is None else found, new=found is None, rearranged=True)


def read(device: torch.device) -> dict[str, Any]:
    """The state of every generator that training commonly draws from: torch, Python, and numpy if it is imported."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "seed": torch.initial_seed(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = [name, [int(key) for key in keys], *rest]
    return state


def check(state: dict[str, Any], device: torch.device) -> None:
    """Raises if ``restore`` or ``begin_anew`` would raise, an error of any type. Leaves the generators as they are."""
    before = read(device)
    try:
        restore(state, device)
    finally:
        restore(before, device)
    if type(state["seed"]) is not int:
        raise TypeError(f"{state['seed']!r} is no seed")


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Sets the generators to a state that ``read`` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))


def begin_anew(state: dict[str, Any], data_rank: int) -> None:
    """Seeds the generators for a part of the data that the run which saved did not have; always with the same seed."""
    seed = (int(state["seed"]) + 0x9E3779B97F4A7C15 * (data_rank + 1)) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
