"""In which order units are needed: recorded in one pass, foreseen in the next."""

from __future__ import annotations

from ..states.unit import Unit


class Order:
    """The order in which units were needed, recorded in one pass to be foreseen in the next."""

    def __init__(self) -> None:
        self.last: list[Unit] = []
        self._now: list[Unit] = []
        self._cursor = 0

    def begin(self) -> None:
        self._now, self._cursor = [], 0

    def enter(self, unit: Unit, ahead: int) -> list[Unit]:
        """Notes that ``unit`` is needed now; returns the units that came next the last time."""
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
        """Whether nothing came after the unit that was entered last."""
        return 0 < self._cursor == len(self.last)

    def end(self) -> None:
        if self._now:
            self.last = self._now
        self._now = []
