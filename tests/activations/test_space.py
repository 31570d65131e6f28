"""The space of the device arena, against a list of bytes."""

from __future__ import annotations

import random

from zeroshard.activations.arena import Space


def test_ranges_never_overlap_and_all_of_it_comes_back() -> None:
    chance = random.Random(0)
    space, owner, taken = Space(64), [0] * 64, {}
    for number in range(1, 2000):
        if taken and chance.random() < 0.5:
            start, size = taken.pop(chance.choice(list(taken)))
            owner[start : start + size] = [0] * size
            space.give_back(start, size)
        else:
            size = chance.randint(1, 20)
            start = space.take(size)
            runs = "".join("." if mark == 0 else "x" for mark in owner).split("x")
            assert (start is None) == (max(map(len, runs)) < size)
            if start is not None:
                assert not any(owner[start : start + size])
                owner[start : start + size] = [number] * size
                taken[number] = (start, size)
        assert space.largest == max(map(len, "".join("." if mark == 0 else "x" for mark in owner).split("x")))
    for start, size in taken.values():
        space.give_back(start, size)
    assert space.take(64) == 0
