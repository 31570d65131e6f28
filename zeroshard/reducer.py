"""When gradients are reduced, and how ranks stay together while they differ in what they used.

- Every backward pass reduces every flat once, in one fixed order: the reverse of the first recorded forward. A flat
  goes as soon as it is ready and all before it have gone; what is left goes when backward ends.
- Ready means complete, except where parameters are shards: there a backward gathers too, and a rank that waits for
  another's gradient while that one waits for a gather would hang. So there ready means that the backward of the next
  unit has begun, which happens at the same point on all ranks whatever parameters they used.
- Once a step the ranks agree (one small all-reduce) on which parameters anybody used, which flats hold gradients that
  came too late, and that all of them did the same operations. Late ones are reduced then, in ``step()``, and a flat
  that was ever incomplete is from then on reduced only there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .buffers import Buffers
from .comm import DisagreementError, Fabric, Lane
from .gradient import FlatGradient
from .unit import Flat, Unit

IN_FLIGHT = 2
"""Reduces under way at a time. Bounds the memory of gradients that are not yet shards (C_B)."""


class Reducer:
    """Reduces the gradients of all trainable flats."""

    def __init__(self, units: Iterable[Unit], fabric: Fabric, buffers: Buffers, *, by_position: bool) -> None:
        self._fabric, self._buffers = fabric, buffers
        self._by_position = by_position
        self.flats = [flat for unit in units for flat in unit.trainable_flats]
        self._early: list[Flat] = []
        self._ordered = False
        self._late: list[Flat] = []
        self._position = 0
        self._passed: set[Flat] = set()
        self._incomplete: set[Flat] = set()
        self._inflight: deque[FlatGradient] = deque()
        self._backwards = 0
        self._agreed = False
        self.synchronous = True
        """False inside ``no_sync``: gradients stay on their rank."""

    @property
    def gradients(self) -> list[FlatGradient]:
        return [gradient_of(flat) for flat in self.flats]

    def set_order(self, forward: list[Unit]) -> None:
        """Fixes the order of reduces, once, from the first forward pass."""
        if not self._ordered:
            self._ordered = True
            met = [flat for unit in dict.fromkeys(forward) for flat in unit.trainable_flats]
            missed = [flat for flat in self.flats if flat not in set(met)]
            self._early = [*missed, *met][::-1]

    def begin_backward(self) -> None:
        self._backwards += 1
        self._agreed = False
        for gradient in self.gradients:
            gradient.begin_backward()

    def passed(self, unit: Unit) -> None:
        """The backward of another unit has begun, so this unit's is over."""
        if self._by_position:
            self._passed.update(unit.trainable_flats)
            self._advance()

    def completed(self, flat: Flat) -> None:
        """All parameters of a flat have their gradients."""
        if not self._by_position:
            self._passed.add(flat)
            self._advance()

    def end_backward(self) -> None:
        if self.synchronous:
            self._passed.update(self._early)
            self._advance()
            self._position = 0
        self._passed.clear()
        for gradient in self.gradients:
            if gradient.visible:
                gradient.settle()
            gradient.show()

    def agree(self) -> bool:
        """Brings all ranks to the same averaged gradients and the same list of used parameters. In ``step()``.

        Returns whether anything is new since the last agreement.
        """
        for gradient in self.gradients:
            gradient.hide()
        if self._agreed:
            return False
        self._agreed = True
        self._position = 0
        self._passed.clear()
        if self._fabric.world > 1:
            self._compare()
        for flat in (flat for flat in [*self._early, *self._late] if gradient_of(flat).unreduced):
            gradient_of(flat).reduce()
        self._inflight.clear()
        for gradient in self.gradients:
            gradient.settle()
        self._incomplete.clear()
        return True

    def show(self) -> None:
        for gradient in self.gradients:
            gradient.show()

    def clear(self) -> None:
        self._inflight.clear()
        self._incomplete.clear()
        self._agreed = False
        for gradient in self.gradients:
            gradient.clear()

    def _advance(self) -> None:
        while self.synchronous and self._position < len(self._early):
            flat = self._early[self._position]
            if flat not in self._passed:
                return
            self._position += 1
            gradient = gradient_of(flat)
            if not gradient.complete:
                self._incomplete.add(flat)
            gradient.reduce()
            self._inflight.append(gradient)
            while len(self._inflight) >= IN_FLIGHT:
                self._inflight.popleft().settle()

    def _compare(self) -> None:
        """One all-reduce (maximum) of small integers; a pair (x, -x) tells whether all ranks have the same x."""
        lanes = self._fabric.lanes
        same = [self._backwards, *(lane.hash for lane in lanes)]
        flats = [*self._early, *self._late]
        used = [mark for flat in flats for mark in gradient_of(flat).used]
        waiting = [gradient_of(flat).unreduced for flat in flats]
        partial = [flat in self._incomplete for flat in flats]
        values = [*same, *(-value for value in same), self._buffers.look(), *used, *waiting, *partial]
        agreed = deque(self._fabric.maximum([int(value) for value in values]))

        highest = [agreed.popleft() for _ in same]
        lowest = [-agreed.popleft() for _ in same]
        if highest[0] != lowest[0]:
            counts = self._fabric.gather_objects(self._backwards)
            raise DisagreementError(
                f"ranks ran different numbers of backward passes before step(): {_by_rank(counts)}; give every rank "
                "the same number of micro-batches"
            )
        for lane, high, low in zip(lanes, highest[1:], lowest[1:], strict=True):
            if high != low:
                raise DisagreementError(self._first_difference(lane))
        self._buffers.differ = bool(agreed.popleft())
        for flat in flats:
            gradient = gradient_of(flat)
            gradient.used = [bool(agreed.popleft()) for _ in gradient.used]
        for flat in flats:
            gradient_of(flat).awaited = bool(agreed.popleft())
        late = [flat for flat in flats if agreed.popleft() or gradient_of(flat).awaited]
        for flat in late:
            if flat in self._early:
                self._early.remove(flat)
                self._late.append(flat)

    def _first_difference(self, lane: Lane) -> str:
        logs = self._fabric.gather_objects(list(lane.log))
        for place, entries in enumerate(zip(*logs, strict=False)):
            if len(set(entries)) > 1:
                return f"ranks did different collectives ({lane.name}, {place + 1}): {_by_rank(entries)}"
        return f"ranks did different numbers of collectives ({lane.name}): {_by_rank([len(log) for log in logs])}"


def gradient_of(flat: Flat) -> FlatGradient:
    """The gradient of a trainable flat."""
    assert flat.gradient is not None
    return flat.gradient


def _by_rank(values: Iterable[object]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
