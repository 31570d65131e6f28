"""Work that grows with the number of flats grows no faster than that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from zeroshard import Offload
from zeroshard.offload.step import HostStep
from zeroshard.states.turns import Turns

FLATS = 300


class UpdatingFlat:
    """Counts how often it is asked whether it is being updated."""

    def __init__(self) -> None:
        self.asked = 0
        self.gathered = False

    @property
    def updating(self) -> bool:
        self.asked += 1
        return not self.gathered

    def start_gather(self) -> None:
        self.gathered = True

    def update(self) -> None:
        self.gathered = False


def turns_of(flats: list[Any]) -> Turns:
    turns = Turns()
    turns.order = lambda: flats
    for flat in flats:
        turns.expect(flat)
    return turns


def test_a_forward_that_gathers_all_flats_asks_each_of_them_once() -> None:
    flats = [UpdatingFlat() for _ in range(FLATS)]
    turns = turns_of(flats)
    for flat in flats:
        turns.gather_up_to(flat)
        assert flat.gathered
    assert sum(flat.asked for flat in flats) == FLATS


def test_what_comes_before_a_flat_is_gathered_first_also_when_it_is_updated_again() -> None:
    flats = [UpdatingFlat() for _ in range(5)]
    turns = turns_of(flats)
    turns.gather_up_to(flats[2])
    assert [flat.gathered for flat in flats] == [True, True, True, False, False]
    flats[1].update()
    turns.expect(flats[1])
    turns.gather_up_to(flats[3])
    assert [flat.gathered for flat in flats] == [True, True, True, True, False]


def test_another_order_is_followed_from_its_beginning() -> None:
    flats = [UpdatingFlat() for _ in range(4)]
    turns = turns_of(flats)
    turns.gather_up_to(flats[1])
    turns.order = lambda reordered=flats[::-1]: reordered
    turns.gather_up_to(flats[3])
    assert [flat.gathered for flat in flats] == [True, True, False, True]


class EarlyFlat:
    """A flat that backward has updated; counts how often it is compared with another."""

    compared = 0

    def __init__(self) -> None:
        self.gradient = SimpleNamespace(used=[True])
        self.home = SimpleNamespace(
            flat=self, updated_early=True, received=1, acknowledge=lambda: None, publish_held=lambda: None
        )

    def __eq__(self, other: object) -> bool:
        EarlyFlat.compared += 1
        return self is other

    __hash__ = object.__hash__


def test_a_step_compares_no_flat_with_all_the_others() -> None:
    flats: list[Any] = [EarlyFlat() for _ in range(FLATS)]
    pipeline: Any = SimpleNamespace(options=Offload(update_in_backward=True), wait=lambda: None)
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    host = HostStep(pipeline, [], optimizer)
    host.homes = {flat: flat.home for flat in flats}
    host.update(flats, step=1)
    assert EarlyFlat.compared == 0
