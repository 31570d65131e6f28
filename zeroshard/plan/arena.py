"""How large the arena (M_D) becomes: a step's checkpoints and gradients, placed as the runtime places them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from ..recompute.arena import WITHOUT_END, Space, padded

MICRO_BATCHES = 2
"""More of them need no more: from the second on, all gradients have their place when the first checkpoint comes."""


class Places(NamedTuple):
    """What a unit takes for its gradients in backward."""

    block: int
    """0 is the root, which has no checkpoint."""
    gradients: tuple[int, ...]
    """Bytes of each."""
    early: bool
    """Whether they are there before the block's checkpoint goes."""


def arena_bytes(checkpoint: int, units: Sequence[Places], micro_batches: int = 1) -> int:
    """Bytes of the block that the first step shows, given its units in the order of backward.

    Gradients stay until the step, and a checkpoint goes with the backward of its block.

    >>> blocks = [Places(block, (2048,), early=True) for block in (3, 2, 1)]
    >>> arena_bytes(1024, blocks), arena_bytes(0, blocks)
    (7168, 6144)
    """
    space = Space(WITHOUT_END)
    of_blocks = [(block, list(members)) for block, members in groupby(units, key=lambda unit: unit.block)]
    checkpoints = sum(block > 0 for block, _ in of_blocks) if checkpoint else 0
    for number in range(min(micro_batches, MICRO_BATCHES)):
        kept = [_take(space, checkpoint) for _ in range(checkpoints)]
        for block, members in of_blocks:
            early = len(members) if members[-1].early else len(members) - 1
            if number == 0:
                _take_all(space, members[:early])
            if block and kept:
                space.give_back(kept.pop(), padded(checkpoint))
            if number == 0:
                _take_all(space, members[early:])
    return space.reached


def _take_all(space: Space, units: Sequence[Places]) -> None:
    for unit in units:
        for size in unit.gradients:
            _take(space, size)


def _take(space: Space, size: int) -> int:
    start = space.take(padded(size))
    assert start is not None, "a space without end has room"
    return start
