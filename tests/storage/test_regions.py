"""The maths of ranges: however a parameter was cut for saving and is cut for loading, every element finds its place."""

from __future__ import annotations

import itertools
import math
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.storage import regions
from zeroshard.storage.regions import Region, Sides, cuts, divide, flaw, numel_of, overlaps, whole

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def divisions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """A parameter cut along one dimension, and each part cut into ranges."""
    divided: list[Sides] = [whole(shape)]
    if shape and draw(st.booleans()):
        axis = draw(st.integers(0, len(shape) - 1))
        places = sorted(draw(st.sets(st.integers(1, max(1, shape[axis] - 1)), max_size=2)) & set(range(1, shape[axis])))
        edges = [0, *places, shape[axis]]
        divided = [
            (*whole(shape)[:axis], (low, high), *whole(shape)[axis + 1 :]) for low, high in itertools.pairwise(edges)
        ]
    regions = []
    for box in divided:
        size = numel_of(box)
        edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
        regions += [Region(box, low, high) for low, high in itertools.pairwise(edges)]
    return regions


def elements(whole: torch.Tensor, region: Region) -> torch.Tensor:
    part = whole[tuple(slice(low, high) for low, high in region.sides)]
    return part.reshape(-1)[region.start : region.stop].clone()


@given(st.data(), shapes)
@settings(max_examples=300, deadline=None)
def test_any_division_is_put_together_from_any_other(data: st.DataObject, shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    saved, wanted, most = data.draw(divisions(shape)), data.draw(divisions(shape)), data.draw(st.integers(1, 9))
    assert flaw(shape, saved) is None
    for region in wanted:
        target = torch.full((region.numel,), -1)
        times = torch.zeros(region.numel, dtype=torch.int64)
        for other in saved:
            source = elements(whole, other)
            for shape_here, mine, theirs in chain.from_iterable(divide(one, most) for one in overlaps(region, other)):
                assert theirs.end(shape_here) - theirs.offset <= most
                part = source.as_strided(shape_here, theirs.strides, theirs.offset)
                target.as_strided(shape_here, mine.strides, mine.offset).copy_(part)
                times.as_strided(shape_here, mine.strides, mine.offset).add_(1)
        assert torch.equal(target, elements(whole, region))
        assert bool((times == 1).all())


@given(st.data(), shapes)
@settings(max_examples=100, deadline=None)
def test_a_regions_cuts_lie_one_after_the_other(data: st.DataObject, shape: tuple[int, ...]) -> None:
    for region in data.draw(divisions(shape)):
        end = 0
        for cut in cuts(region):
            assert cut.offset == end
            end += numel_of(cut.sides)
        assert end == region.numel
        assert len(list(cuts(region))) <= max(1, 2 * len(shape) - 1)


@given(st.data(), shapes.filter(lambda shape: math.prod(shape) > 1))
@settings(max_examples=100, deadline=None)
def test_what_is_missing_or_twice_is_noticed(data: st.DataObject, shape: tuple[int, ...]) -> None:
    regions = data.draw(divisions(shape))
    number = data.draw(st.integers(0, len(regions) - 1))
    assert flaw(shape, regions[:number] + regions[number + 1 :]) is not None
    assert flaw(shape, [*regions, regions[number]]) is not None


def test_parts_without_elements_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index may have any number of them, at no cost of a data file."""
    looked: list[Sides] = []

    def counted(box: Sides) -> int:
        looked.append(box)
        return numel_of(box)

    monkeypatch.setattr(regions, "numel_of", counted)
    empty = [Region(((0, 0), (place, place + 1)), 0, 0) for place in range(500)]
    assert flaw((0, 500), empty) is None
    assert len(looked) <= 4 * len(empty)
