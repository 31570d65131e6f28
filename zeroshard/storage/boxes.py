"""Pure maths: which elements of a parameter a stored or wanted range is, and where two of them overlap.

A *region* is a range of a parameter's *box*: a box says which part of the whole parameter a group of ranks divides (all
of it, unless tensor parallelism cuts the parameter itself), the range counts elements inside that box in row-major
order. Any region is a few smaller boxes whose elements lie one after the other, so that two regions, however they were
cut, overlap in a few boxes again, each of which one strided copy moves.

>>> whole = whole_box((4, 6))
>>> [cut.box for cut in cuts(Region(whole, 4, 20))]
[((0, 1), (4, 6)), ((1, 3), (0, 6)), ((3, 4), (0, 2))]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Box = tuple[tuple[int, int], ...]
"""A half-open range for every dimension of a parameter."""


class Region(NamedTuple):
    """Some elements of a parameter."""

    box: Box
    start: int
    """First element, counted inside the box."""
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Cut(NamedTuple):
    """A box inside a region, and where its first element lies in it."""

    box: Box
    offset: int


class Overlap(NamedTuple):
    """What two regions have in common, as a box in the memory of each."""

    shape: tuple[int, ...]
    mine: Strided
    theirs: Strided


class Strided(NamedTuple):
    """Where a box lies in a region's elements."""

    offset: int
    strides: tuple[int, ...]

    def reach(self, shape: Sequence[int]) -> tuple[int, int]:
        """The first element that a box of this shape has there, and one past the last."""
        last = self.offset + sum((size - 1) * stride for size, stride in zip(shape, self.strides, strict=True))
        return self.offset, last + 1


def whole_box(shape: Sequence[int]) -> Box:
    """All of a parameter.

    >>> whole_box((2, 3))
    ((0, 2), (0, 3))
    """
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """How long a box is in every dimension."""
    return tuple(stop - start for start, stop in box)


def numel_of(box: Box) -> int:
    """How many elements a box has."""
    return math.prod(shape_of(box))


def intersect(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None if nothing."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def cuts(region: Region) -> Iterator[Cut]:
    """A region as boxes whose elements lie one after the other in it."""
    if region.numel > 0:
        yield from _cuts(region.box, region.start, region.stop, -region.start, ())


def _cuts(box: Box, start: int, stop: int, shift: int, before: Box) -> Iterator[Cut]:
    """Of the range from start to stop of the trailing dimensions; ``before`` are indices in the leading ones."""
    if not box:
        yield Cut(before, start + shift)
        return
    (low, _), *rest = box
    inner = tuple(rest)
    row = numel_of(inner)
    first, last = start // row, -(-stop // row)
    if start % row:  # a row that begins before the range
        end = min(stop, (first + 1) * row)
        yield from _cuts(
            inner, start - first * row, end - first * row, shift + first * row, (*before, _one(low, first))
        )
        first += 1
        if end == stop:
            return
    whole = stop // row
    if first < whole:
        yield Cut((*before, (low + first, low + whole), *inner), first * row + shift)
    if whole < last and stop % row:  # and one that goes on after it
        yield from _cuts(inner, 0, stop - whole * row, shift + whole * row, (*before, _one(low, whole)))


def _one(low: int, index: int) -> tuple[int, int]:
    return low + index, low + index + 1


def overlaps(mine: Region, theirs: Region) -> Iterator[Overlap]:
    """What two regions of one parameter have in common."""
    if mine.box == theirs.box:  # the usual case: nothing but a range of a range
        start, stop = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
        if start < stop:
            yield Overlap((stop - start,), Strided(start - mine.start, (1,)), Strided(start - theirs.start, (1,)))
        return
    if intersect(mine.box, theirs.box) is None:
        return
    for cut in cuts(mine):
        for other in cuts(theirs):
            common = intersect(cut.box, other.box)
            if common is not None:
                yield Overlap(shape_of(common), _strided(common, cut), _strided(common, other))


def _strided(box: Box, cut: Cut) -> Strided:
    """Where a box inside a cut lies in the region that was cut."""
    sizes = shape_of(cut.box)
    strides = tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
    steps = (start - low for (start, _), (low, _) in zip(box, cut.box, strict=True))
    return Strided(cut.offset + sum(step * stride for step, stride in zip(steps, strides, strict=True)), strides)


def flaw(shape: Sequence[int], regions: Iterable[Region]) -> str | None:
    """What keeps regions from being all elements of a parameter, each once; None if they are."""
    by_box: dict[Box, list[Region]] = {}
    for region in regions:
        if numel_of(region.box):  # one without elements lacks none and overlaps nothing
            by_box.setdefault(region.box, []).append(region)
    boxes = list(by_box)
    if sum(map(numel_of, boxes)) > math.prod(shape):
        return "parts of it overlap"
    for place, box in enumerate(boxes):
        if any(intersect(box, other) for other in boxes[:place]):
            return "parts of it overlap"
        end = 0
        for region in sorted(by_box[box], key=lambda region: region.start):
            if region.start < end:
                return f"ranges of it overlap at element {region.start}"
            if region.start > end:
                return f"elements {end} to {region.start} are missing"
            end = region.stop
        if end != numel_of(box):
            return f"elements from {end} on are missing"
    if sum(map(numel_of, boxes)) != math.prod(shape):
        return "parts of it are missing"
    return None
