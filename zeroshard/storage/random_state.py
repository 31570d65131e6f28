"""Random number generators of one rank: read, and set again.

Ranks that divide a model (tensor parallelism) commonly draw the same numbers: what each of them has whole, such as the
mask of a dropout between their matrices, must be the same on all. So where the ranks are arranged otherwise than in the
run that saved, a state goes to all ranks that have the same part of the data.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..comm.fabric import Fabric


class Seat(NamedTuple):
    """Where a rank stands among all."""

    data: int
    """Which part of the data it has."""
    model: int
    """Which part of the model it has."""
    degree: int
    """Of tensor parallelism: parts of the model."""

    @classmethod
    def of(cls, fabric: Fabric) -> Seat:
        return cls(fabric.data_rank, fabric.model.rank, fabric.model.world)


class Source(NamedTuple):
    """Whose state a rank takes."""

    rank: int
    """Of the run that saved."""
    new: bool
    """That run had no rank with this part of the data: the state is but where new numbers begin."""
    rearranged: bool
    """That run had another number of ranks, or divided the model otherwise."""


def source_of(mine: Seat, world: int, saved: Sequence[Seat]) -> Source:
    """Finds it, for a rank of a world of this size."""
    if len(saved) == world and mine in saved:
        return Source(saved.index(mine), new=False, rearranged=False)
    first = {place.data: rank for rank, place in reversed(list(enumerate(saved))) if place.model == 0}
    found = first.get(mine.data)
    return Source(first.get(0, 0) if found is None else found, new=found is None, rearranged=True)


def read(device: torch.device) -> dict[str, Any]:
    """The state of every generator that training commonly draws from: torch's, Python's, and numpy's if it is used."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "seed": torch.initial_seed(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = [name, [int(key) for key in keys], *rest]
    return state


def check(state: dict[str, Any], device: torch.device) -> None:
    """Raises, of whatever type, where ``restore`` or ``begin_anew`` would: sets generators that nobody uses."""
    torch.Generator().set_state(state["torch"])
    random.Random().setstate(state["python"])
    if type(state["seed"]) is not int:
        raise TypeError(f"{state['seed']!r} is no seed")
    if device.type == "cuda" and "cuda" in state:
        torch.Generator(device).set_state(state["cuda"])
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.RandomState().set_state(_numpy_state(state))


def _numpy_state(state: dict[str, Any]) -> tuple[Any, ...]:
    numpy: Any = sys.modules["numpy"]
    name, keys, *rest = state["numpy"]
    return name, numpy.array(keys, dtype=numpy.uint32), *rest


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Goes on where ``read`` was."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(_numpy_state(state))


def begin_anew(state: dict[str, Any], data_rank: int) -> None:
    """For a part of the data that did not exist when the state was saved: numbers of its own, but always these."""
    seed = (int(state["seed"]) + 0x9E3779B97F4A7C15 * (data_rank + 1)) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
