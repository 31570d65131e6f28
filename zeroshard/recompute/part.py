"""How many elements of a checkpoint each model-parallel rank stores (P_a)."""

from __future__ import annotations

from ..config.layout import round_up

ALIGNMENT = 64
"""A part is a multiple of this many elements."""


def part_of(numel: int, ranks: int) -> int:
    """Elements of the largest part. The last ranks may store fewer, but each contributes this many to the gather.

    >>> part_of(1000, 1), part_of(1000, 2)
    (1000, 512)
    """
    return round_up(-(-numel // ranks), ALIGNMENT) if ranks > 1 else numel
