"""The order in which units are needed: recorded in one pass, used in the next."""

from __future__ import annotations

from ..states.unit import Unit


class Order:
    """The order of units in the last pass, and the position of the pass that runs now."""

    def __init__(self) -> None:
        self.last: list[Unit] = []
        self._now: list[Unit] = []
        self._cursor = 0

    def begin(self) -> None:
        self._now, self._cursor = [], 0

    def enter(self, unit: Unit, ahead: int) -> list[Unit]:
        """Records that ``unit`` is needed now. Returns the units that came next in the last pass."""
        if self._now and self._now[-1] is unit:
            return []
        self._now.append(unit)
        try:
            self._cursor = self.last.index(unit, self._cursor) + 1
        except ValueError:
            return []
        return self.last[self._cursor : self._cursor + ahead]

    @property
    def at_end(self) -> bool:
        """Whether the unit entered last was the last one in the last pass."""
        return 0 < self._cursor == len(self.last)

    def end(self) -> None:
        if self._now:
            self.last = self._now
        self._now = []
