"""The device arena: its space against a list of bytes, and steps that take and give back the same again."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch

from zeroshard.recompute.arena import DeviceArena, Space


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


def a_step(arena: DeviceArena, seed: int, scale: int = 1) -> list[bool]:
    """Takes pieces of many sizes and gives them back in any order; which of them had a place."""
    chance, alive, placed = random.Random(seed), [], []
    for _ in range(200):
        if alive and chance.random() < 0.45:
            alive.pop(chance.randrange(len(alive))).free()
        else:
            alive.append(arena.take(scale * chance.randint(1, 5000), torch.bfloat16))
            placed.append(alive[-1].in_arena)
    for slot in alive:
        slot.free()
    return placed


@pytest.mark.parametrize("seed", range(5))
def test_a_step_that_takes_the_same_again_has_room_for_all_of_it(seed: int) -> None:
    arena = DeviceArena(torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not any(a_step(arena, seed))
        arena.settle(1)
        size = arena.size
        for step in (2, 3):
            assert all(a_step(arena, seed))
            arena.settle(step)
        assert arena.size == size


def test_an_arena_that_grows_says_why() -> None:
    arena = DeviceArena(torch.device("cpu"))
    a_step(arena, 0)
    arena.settle(1)
    size = arena.size
    held = [arena.take(size // 8, torch.uint8) for _ in range(7)]
    for slot in held[::2]:
        slot.free()
    wide = arena.take(size // 4, torch.uint8)  # no gap is as wide
    assert not wide.in_arena
    assert arena.homeless >= size // 4
    for slot in (*held[1::2], wide):
        slot.free()
    assert arena.homeless == 0
    with pytest.warns(
        UserWarning, match=r"arena: .* had only gaps between pieces of other sizes for step 2, so it grew"
    ):
        arena.settle(2)
    assert arena.size > size
    a_step(arena, 0, scale=3)
    with pytest.warns(UserWarning, match=r"arena: .* were too little for step 3, so it grew by"):
        arena.settle(3)
    assert all(a_step(arena, 0, scale=3))


def test_a_slot_that_a_finalizer_gives_back_in_the_midst_of_another_call_waits_for_its_end() -> None:
    arena = DeviceArena(torch.device("cpu"))
    for slot in [arena.take(512, torch.uint8) for _ in range(4)]:
        slot.free()
    arena.settle(1)
    first, second = (arena.take(512, torch.uint8) for _ in range(2))
    space = arena._blocks[0][0]

    class Interrupted(list[tuple[int, int]]):
        def __setitem__(self, *args: Any) -> None:
            first.free()
            super().__setitem__(*args)

    space._free = Interrupted(space._free)
    third = arena.take(512, torch.uint8)
    space._free = list(space._free)
    slots = [second, third, arena.take(512, torch.uint8), arena.take(512, torch.uint8)]
    assert len({slot.tensor.data_ptr() for slot in slots if slot.tensor is not None}) == 4
    for slot in slots:
        slot.free()
    assert arena.homeless == 0
    assert space.largest == space.size == 4 * 512
