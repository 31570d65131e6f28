"""The host memory of checkpoints is used again, and bounded by the most that was needed at once."""

from __future__ import annotations

import random

import torch

from zeroshard.recompute.host_pool import HostPool, HostSlot


def test_a_step_like_the_one_before_allocates_nothing() -> None:
    pool = HostPool(torch.device("cpu"), 1)
    seen = set()
    for _ in range(3):
        slots = [pool.take(size) for size in (1000, 5000, 1000, 300)]
        seen |= {slot.memory.data_ptr() for slot in slots}
        for slot in slots:
            pool.give_back(slot)
    assert len(seen) == 4
    assert pool.bytes == 1024 + 5120 + 1024 + 384


def test_varying_shapes_hold_at_most_twice_what_was_needed_at_once() -> None:
    pool, chance = HostPool(torch.device("cpu"), 1), random.Random(0)
    peak = 0
    for _ in range(200):
        length = chance.randint(1, 5000)
        taken: dict[int, HostSlot] = {}
        for number in range(4):
            taken[number] = pool.take(128 * length)
            taken[number].memory[: 128 * length].fill_(number)
        taken[4] = pool.take(128 * chance.randint(1, 20))
        peak = max(peak, 4 * 128 * length + 128 * 20)
        assert pool.bytes <= 2 * peak
        for number, slot in taken.items():
            assert number == 4 or bool((slot.memory[: 128 * length] == number).all())
            pool.give_back(slot)
