"""Pure maths: which elements of a parameter a range has, and where two ranges overlap.

The *sides* of a box are a half-open range for every dimension of a parameter. A box is the whole parameter, or the part
of it that tensor parallelism leaves to a rank. A *region* is a range of a box: the range counts the elements inside the
box in row-major order. Any region is made of a few smaller boxes whose elements lie one after the other. So two
regions, however they were cut, overlap in a few boxes, and one strided copy moves each of these.

>>> [cut.sides for cut in cuts(Region(whole((4, 6)), 4, 20))]
[((0, 1), (4, 6)), ((1, 3), (0, 6)), ((3, 4), (0, 2))]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..config.layout import Box, contiguous_strides

Sides = tuple[tuple[int, int], ...]
"""Of a box: for every dimension the first index, and one past the last."""


class Region(NamedTuple):
    """A range of the elements of a box inside a parameter."""

    sides: Sides
    start: int
    """First element, counted inside the box."""
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @classmethod
    def of_part(cls, box: Box | None, shape: Sequence[int], start: int, stop: int) -> Region:
        """A range of the part that a rank has of a parameter. ``box`` says where the part of this shape lies."""
        offsets = (0,) * len(shape) if box is None else box.offsets
        return cls(tuple((low, low + size) for low, size in zip(offsets, shape, strict=True)), start, stop)


class Cut(NamedTuple):
    """A box inside a region, and where the box's first element lies in the region."""

    sides: Sides
    offset: int


class BoxStrides(NamedTuple):
    """Where the elements of a box lie in a region."""

    offset: int
    strides: tuple[int, ...]

    def end(self, shape: Sequence[int]) -> int:
        """One past the last element of a box of this shape."""
        return 1 + self.offset + sum((size - 1) * stride for size, stride in zip(shape, self.strides, strict=True))


class Overlap(NamedTuple):
    """The elements that two regions have in common, as a box in the memory of each."""

    shape: tuple[int, ...]
    mine: BoxStrides
    theirs: BoxStrides


def whole(shape: Sequence[int]) -> Sides:
    """All of a parameter.

    >>> whole((2, 3))
    ((0, 2), (0, 3))
    """
    return tuple((0, size) for size in shape)


def shape_of(sides: Sides) -> tuple[int, ...]:
    """The length of a box in every dimension."""
    return tuple(stop - start for start, stop in sides)


def numel_of(sides: Sides) -> int:
    """The number of elements of a box."""
    return math.prod(shape_of(sides))


def intersect(one: Sides, other: Sides) -> Sides | None:
    """The box that two boxes have in common; None if there is none."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def cuts(region: Region) -> Iterator[Cut]:
    """A region as boxes whose elements lie one after the other in it."""
    if region.numel > 0:
        yield from _cuts(region.sides, region.start, region.stop, -region.start, ())


def _cuts(sides: Sides, start: int, stop: int, shift: int, before: Sides) -> Iterator[Cut]:
    """The cuts of a range of the trailing dimensions; ``before`` are indices in the leading dimensions."""
    if not sides:
        yield Cut(before, start + shift)
        return
    (low, _), *rest = sides
    inner = tuple(rest)
    row = numel_of(inner)
    first, last = start // row, stop // row  # whole rows of the range begin at first, or at the row after it

    def part_of_row(number: int, begin: int, end: int) -> Iterator[Cut]:
        here = (low + number, low + number + 1)
        return _cuts(inner, begin, end, shift + number * row, (*before, here))

    if start % row:
        yield from part_of_row(first, start % row, min(stop - first * row, row))
        first += 1
    if first < last:
        yield Cut((*before, (low + first, low + last), *inner), first * row + shift)
    if first <= last and stop % row:
        yield from part_of_row(last, 0, stop % row)


def overlaps(mine: Region, theirs: Region) -> Iterator[Overlap]:
    """The boxes that two regions of one parameter have in common."""
    if mine.sides == theirs.sides:  # the usual case: a range of a range
        start, stop = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
        if start < stop:
            yield Overlap((stop - start,), BoxStrides(start - mine.start, (1,)), BoxStrides(start - theirs.start, (1,)))
        return
    if intersect(mine.sides, theirs.sides) is None:
        return
    for cut in cuts(mine):
        for other in cuts(theirs):
            common = intersect(cut.sides, other.sides)
            if common is not None:
                yield Overlap(shape_of(common), _strided(common, cut), _strided(common, other))


def _strided(sides: Sides, cut: Cut) -> BoxStrides:
    """Where a box inside a cut lies in the region that was cut."""
    strides = contiguous_strides(shape_of(cut.sides))
    steps = (start - low for (start, _), (low, _) in zip(sides, cut.sides, strict=True))
    return BoxStrides(cut.offset + sum(step * stride for step, stride in zip(steps, strides, strict=True)), strides)


def divide(overlap: Overlap, most: int) -> Iterator[Overlap]:
    """An overlap in parts. The elements of a part lie within ``most`` elements of the other region's memory."""
    shape, mine, theirs = overlap
    if theirs.end(shape) - theirs.offset <= most:
        yield overlap
        return
    axis = next(axis for axis, size in enumerate(shape) if size > 1)
    middle = shape[axis] // 2
    for start, stop in ((0, middle), (middle, shape[axis])):
        yield from divide(
            Overlap(
                (*shape[:axis], stop - start, *shape[axis + 1 :]),
                BoxStrides(mine.offset + start * mine.strides[axis], mine.strides),
                BoxStrides(theirs.offset + start * theirs.strides[axis], theirs.strides),
            ),
            most,
        )


def flaw(shape: Sequence[int], regions: Iterable[Region]) -> str | None:
    """None if regions have every element of a parameter exactly once; otherwise a text that says what is wrong.

    The boxes of the regions must be the cells of a grid, as tensor parallelism cuts them. So no box is compared with
    all others: an index may have any number of boxes.
    """
    by_box: dict[Sides, list[Region]] = {}
    for region in regions:
        if numel_of(region.sides):  # a region of an empty box lacks nothing and overlaps nothing
            by_box.setdefault(region.sides, []).append(region)
    boxes = list(by_box)
    total = sum(map(numel_of, boxes))
    if total > math.prod(shape):
        return "parts of it overlap"
    if total != math.prod(shape):
        return "parts of it are missing"
    if boxes and not _is_grid(shape, boxes):
        return "parts of it overlap, or are not the cells of a grid"
    for box in boxes:
        end = 0
        for region in sorted(by_box[box], key=lambda region: region.start):
            if region.start < end:
                return f"ranges of it overlap at element {region.start}"
            if region.start > end:
                return f"elements {end} to {region.start} are missing"
            end = region.stop
        if end != numel_of(box):
            return f"elements from {end} on are missing"
    return None


def _is_grid(shape: Sequence[int], boxes: Sequence[Sides]) -> bool:
    """True if different boxes are all cells of a grid: the sides in every dimension lie one after the other."""
    cells = 1
    for size, sides in zip(shape, zip(*boxes, strict=True), strict=False):
        ranges = sorted(set(sides))
        cells *= len(ranges)
        edges = [0, *(stop for _, stop in ranges)]
        if [start for start, _ in ranges] != edges[:-1] or edges[-1] != size:
            return False
    return cells == len(boxes)
