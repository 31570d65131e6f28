"""Which units' states stay on the device: the first ones, as many as there is room for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.offload.place import room_for_states, stay_on_device, stay_within

SIZES = st.lists(st.integers(1, 10**10), min_size=1, max_size=20)


@settings(deadline=None)
@given(SIZES, st.floats(0, 1))
def test_the_host_gets_at_least_its_fraction_and_no_unit_more_than_needed(sizes: list[int], fraction: float) -> None:
    stay = stay_on_device(sizes, fraction)
    staying = sum(size for size, stays in zip(sizes, stay, strict=True) if stays)
    slack = 1e-6 * sum(sizes) + 0.5
    assert sum(sizes) - staying >= fraction * sum(sizes) - slack
    before = 0
    for size, stays in zip(sizes, stay, strict=True):
        if stays:
            before += size
        else:  # the first ones stay, but for those that have no room
            assert before + size >= (1 - fraction) * sum(sizes) - slack


@given(SIZES)
def test_fractions_0_and_1_are_all_or_nothing(sizes: list[int]) -> None:
    assert all(stay_on_device(sizes, 0))
    assert not any(stay_on_device(sizes, 1))


def test_fractions_that_no_binary_number_is_do_not_lose_a_unit() -> None:
    assert stay_on_device([1] * 10, 0.9) == [True] + [False] * 9
    assert stay_on_device([1] * 10, 0.1) == [True] * 9 + [False]
    assert stay_on_device([1, 1, 1], 2 / 3) == [True, False, False]


@given(SIZES, st.integers(0, 10**12))
def test_a_budget_is_never_exceeded_and_used_as_far_as_it_goes(sizes: list[int], budget: int) -> None:
    stay = stay_within(sizes, 16, budget)
    before = 0
    for size, stays in zip(sizes, stay, strict=True):
        assert stays == (16 * (before + size) <= budget)
        before += size if stays else 0


def test_a_budget_of_nothing_keeps_nothing() -> None:
    assert stay_within([5, 1], 16, 0) == [False, False]


def test_the_default_budget_is_a_part_of_what_this_process_may_still_use(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, memory = torch.device("cuda", 0), {"free": 50_000, "fraction": 1.0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (memory["free"], 100_000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10_000)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 12_000)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: memory["fraction"])
    assert room_for_states(gpu, 1) == 0.6 * 52_000
    assert room_for_states(gpu, 2) == 0.6 * 27_000, "another rank has the other half of what is free"
    assert room_for_states(gpu, 1, movable=10_000) == 0.6 * 62_000, "parameters on the GPU move"
    memory["fraction"] = 0.24
    assert room_for_states(gpu, 1) == 0.6 * 14_000
