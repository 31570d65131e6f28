"""Frozen parameters that a checkpoint leaves out: the run that loads must have the same ones already, bit for bit.

The checkpoint has their names, shapes, dtypes, and a sum over the bits of each. The sum multiplies the bits of every
element by a number that belongs to the element's place. So ranks add up their parts, however a parameter is divided,
and other elements, or the same ones in other places, give another sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..runtime import Runtime
from .contents import name_of, written_range

NAME = "frozen"
"""What an index calls the table of parameters that are left out."""
ELEMENTS = 1 << 22
"""Elements that are summed up at a time."""
WORD = 1 << 64
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FIRST, SECOND = 0x9E3779B97F4A7C15 - WORD, 0x2545F4914F6CDD1D
"""Odd numbers whose multiples look random."""

Sums = dict[str, int]


def sums_of(runtime: Runtime) -> Sums:
    """This rank's part of the sum over each frozen parameter's bits.

    Raises:
        ValueError: tensor parallelism divides the model.
    """
    fabric = runtime.fabric
    if fabric.model.world > 1:
        raise ValueError("frozen=False is not for a model that tensor parallelism divides; leave it out")
    found: Counter[str] = Counter()
    for flat in runtime.flats:
        if flat.trainable:
            continue
        part = written_range(flat, fabric)
        values, offset = flat.parameters_at_rest, part.start - flat.at_rest.start
        for slot in flat.layout.slots:
            found[name_of(slot.name)] += 0
        for piece in flat.layout.pieces(part):
            own = values[offset + piece.offset :][: piece.numel]
            found[name_of(flat.layout.slots[piece.slot].name)] += _sum(own, piece.start)
    return dict(found)


def table_of(runtime: Runtime, sums: Iterable[Sums]) -> dict[str, Any]:
    """What a checkpoint says of the parameters that it leaves out. ``sums``: those of all ranks."""
    totals: Counter[str] = Counter()
    for each in sums:
        totals.update(each)
    return {
        name_of(slot.name): {
            "shape": list(slot.whole_shape),
            "dtype": str(flat.dtype).removeprefix("torch."),
            "sum": f"{totals[name_of(slot.name)] % WORD:016x}",
        }
        for flat in runtime.flats
        if not flat.trainable
        for slot in flat.layout.slots
    }


def difference(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """What to say of the first parameter that is not as it was; None if all are."""
    for name, entry in saved.items():
        mine = here.get(name)
        if mine is None:
            return f"leaves out {name!r}, which its run had frozen and this run trains; train and freeze the same"
        if mine["dtype"] != entry["dtype"]:
            return f"leaves out {name!r}, frozen in {entry['dtype']}, which is {mine['dtype']} here; use that precision"
        if mine != entry:
            return (
                f"leaves out the frozen {name!r}, which has other values here; give shard() the weights= that its run "
                "began with"
            )
    return None


def _sum(values: Tensor, start: int) -> int:
    """The sum of a range of a parameter's elements that begins at an element of it."""
    bits, total = values.detach().view(BITS[values.element_size()]), 0
    for begin in range(0, len(bits), ELEMENTS):
        part = bits[begin : begin + ELEMENTS].long() + 1
        part.bitwise_xor_((part >> 32) & 0xFFFFFFFF)  # or the highest bits of 8-byte elements would hardly count
        first = start + begin
        factors = torch.arange(first, first + len(part), device=part.device).add_(1).mul_(FIRST)
        factors.bitwise_xor_(factors >> 29).mul_(SECOND).bitwise_or_(1)
        total += int(factors.mul_(part).sum())
    return total
