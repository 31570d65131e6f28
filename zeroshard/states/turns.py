"""The order of gathers of flats whose updates go on after ``step()`` has returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .flat import Flat


class Turns:
    """The one order in which all ranks gather flats that the host updates.

    Without this order, ranks would gather in different orders: a flat's update ends at another time on every rank.
    """

    def __init__(self) -> None:
        self.order: Callable[[], list[Flat]] = list
        """Returns the order: the same list object as before, unless the order has changed."""
        self._known: list[Flat] | None = None
        self._place: dict[Flat, int] = {}
        self._first = 0
        """No flat before this place in the order is being updated."""

    def expect(self, flat: Flat) -> None:
        """Notes that the host updates a flat from now on."""
        self._look_up()
        assert flat in self._place, f"{flat.label} is in no order of publishing"
        self._first = min(self._first, self._place[flat])

    def gather_up_to(self, flat: Flat) -> None:
        """Gathers this flat, and before it all earlier flats in the order that are being updated."""
        order = self._look_up()
        while self._first <= self._place[flat]:
            other = order[self._first]
            if other.updating:
                other.start_gather()
            self._first += 1  # only now: the next call repeats a gather that failed

    def _look_up(self) -> list[Flat]:
        order = self.order()
        if order is not self._known:
            self._known, self._first = order, 0
            self._place = {flat: place for place, flat in enumerate(order)}
        return order
