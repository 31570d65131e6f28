"""Combinations of options: a few of them in ``make test``, all of them in ``make test-all``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Combination = tuple[int, ...]
"""For each axis, which of its values."""


def matrix(*, together: int | None = None, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrises a test over all combinations of its arguments' values.

    Those that ``make test`` runs hold every value of two arguments, or every pair of values of three and more; with
    ``together=1`` every value, for a test that takes seconds. The rest are marked ``slow``.
    """
    values = {name: list(axis) for name, axis in axes.items()}
    sizes = [len(axis) for axis in values.values()]
    quick = cover(sizes, together=together or max(1, min(2, len(sizes) - 1)))
    cases = []
    for combination in product(*map(range, sizes)):
        chosen = [axis[place] for axis, place in zip(values.values(), combination, strict=True)]
        marks = () if combination in quick else (pytest.mark.slow,)
        names = [_name(*each) for each in zip(values, chosen, combination, strict=True)]
        cases.append(pytest.param(*chosen, marks=marks, id="-".join(names)))
    return pytest.mark.parametrize(tuple(values), cases)


def cover(sizes: Sequence[int], together: int) -> set[Combination]:
    """Combinations in which every value of any ``together`` axes meets every other; few, found greedily.

    >>> sorted(cover([3, 2], together=1))
    [(0, 0), (1, 1), (2, 0)]
    >>> len(cover([4, 3, 2], together=2))
    12
    """
    everything = list(product(*map(range, sizes)))
    open_pairs = {pair for combination in everything for pair in _pairs(combination, together)}
    chosen: set[Combination] = set()
    while open_pairs:
        best = max(everything, key=lambda combination: len(open_pairs & _pairs(combination, together)))
        open_pairs -= _pairs(best, together)
        chosen.add(best)
    return chosen


Stages = tuple[int, ...]

in_stages = pytest.mark.parametrize(
    "stages",
    [
        pytest.param((1, 3), id="stages 1 and 3"),
        pytest.param((0, 2), id="stages 0 and 2", marks=pytest.mark.slow),
    ],
)
"""For tests that go through the stages. ``make test`` runs one in which parameters are whole, and the one that divides
everything."""


def quick(names: Iterable[str], *chosen: str) -> list[Any]:
    """Cases by name, of which ``make test`` runs the chosen ones."""
    names = list(names)
    assert set(chosen) <= set(names), f"{set(chosen) - set(names)} are no cases"
    return [name if name in chosen else slow(name) for name in names]


def slow(*values: Any) -> Any:
    """A case of a parametrised test that ``make test`` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def _pairs(combination: Combination, together: int) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(combination), together))


def _name(axis: str, value: object, place: int) -> str:
    return str(value) if isinstance(value, str | int | float | None) else f"{axis}{place}"
