"""How a checkpoint is divided among model-parallel ranks (P_a)."""

from __future__ import annotations

from ..config.layout import round_up

ALIGNMENT = 64
"""Parts are multiples of so many elements."""


def part_of(numel: int, ranks: int) -> int:
    """Elements of one rank's part; the last ranks may have fewer, and what is gathered is so many of each rank.

    >>> part_of(1000, 1), part_of(1000, 2)
    (1000, 512)
    """
    return round_up(-(-numel // ranks), ALIGNMENT) if ranks > 1 else numel
