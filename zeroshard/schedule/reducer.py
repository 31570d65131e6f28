"""When gradients are reduced, and how ranks stay together while they differ in what they used.

- Every backward pass reduces every flat once, in one order that all ranks share: the reverse of rank 0's first forward
  (of ``modules()`` until that is known). A flat goes as soon as it is ready and all before it have gone; what is left
  goes when backward ends.
- Ready means complete, except where parameters are shards: there a backward gathers too, and a rank that waits for
  another's gradient while that one waits for a gather would hang. So there ready means that the backward of the next
  unit has begun, which happens at the same point on all ranks whatever parameters they used.
- Once a step the ranks agree (one small all-reduce) on which parameters anybody used, which flats hold gradients that
  came too late, and that all of them did the same operations. Gradients that came too late are reduced then, in
  ``step()``. A flat that was ever incomplete waits from then on for the end of backward, so that it holds up no other,
  and one that nobody used is left out until somebody does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ..comm.fabric import DisagreementError, Fabric
from ..comm.lane import Lane
from ..config.bounds import IN_FLIGHT
from ..states.buffers import Buffers
from ..states.flat import Flat
from ..states.gradient import FlatGradient, hide_all
from ..states.unit import Unit


class Reducer:
    """Reduces the gradients of all trainable flats."""

    def __init__(self, units: Iterable[Unit], fabric: Fabric, buffers: Buffers, *, by_position: bool) -> None:
        self._fabric, self._buffers = fabric, buffers
        self._by_position = by_position
        self.flats = [flat for unit in units for flat in unit.trainable_flats]
        self.order: list[Flat]
        """In which flats are reduced; updates are published in the reverse of it. The same on all ranks."""
        self._set_order(self.flats[::-1])
        self._proposal: list[Flat] | None = None
        self._ordered = False
        self._late: set[Flat] = set()
        self._idle: set[Flat] = set()
        self._early = self.order
        self._position = 0
        self._passed: set[Flat] = set()
        self._incomplete: set[Flat] = set()
        self._inflight: deque[FlatGradient] = deque()
        self._backwards = 0
        self._agreed = False
        self.synchronous = True
        """False inside ``no_sync``: gradients stay on their rank."""
        self.stop_asked = False
        """This rank wants training to end. The next agreement tells the others."""
        self.stop_agreed = False
        """Some rank wanted training to end when the ranks last agreed. The same on all ranks."""

    @property
    def gradients(self) -> list[FlatGradient]:
        return [flat.gradient for flat in self.flats]

    def propose_order(self, forward: list[Unit]) -> None:
        """Takes note of the first forward pass; rank 0's becomes the order of all in the first agreement."""
        if self._proposal is None:
            met = dict.fromkeys(flat for unit in forward for flat in unit.trainable_flats)
            missed = [flat for flat in self.flats if flat not in met]
            self._proposal = [*missed, *met][::-1]

    def _settle_order(self) -> None:
        if not self._ordered:
            labels = None if self._proposal is None else [flat.label for flat in self._proposal]
            proposed = self._fabric.from_rank_zero(labels)
            if proposed is not None:
                by_label = {flat.label: flat for flat in self.flats}
                self._set_order([by_label[label] for label in proposed])
            self._ordered = True

    def _set_order(self, order: list[Flat]) -> None:
        self.order, self._publishing_order = order, order[::-1]

    def publishing_order(self) -> list[Flat]:
        """In which updates are published: that in which forward needs them. The same list until the order changes."""
        return self._publishing_order

    def begin_backward(self) -> None:
        self._backwards += 1
        self._agreed = False
        hide_all(self.gradients)
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
            for flat in self.order:
                if flat in self._late and flat not in self._idle:
                    self._reduce(flat)
            self._position = 0
        self._passed.clear()
        for flat in self.flats:
            if flat.home.takes_early:
                flat.gradient.settle()
            flat.gradient.show()

    def agree(self) -> bool:
        """Brings all ranks to the same averaged gradients and the same list of used parameters. In ``step()``.

        Returns whether anything is new since the last agreement.
        """
        hide_all(self.gradients)
        if self._agreed:
            return False
        self._position = 0
        self._passed.clear()
        self.stop_agreed = self.stop_asked
        if self._fabric.world > 1:
            self._compare()
        for flat in self.order:
            if flat.gradient.unreduced:
                self._reduce(flat)
        self._settle_order()
        self._early = [flat for flat in self.order if flat not in self._late and flat not in self._idle]
        self._inflight.clear()
        for gradient in self.gradients:
            gradient.settle()
        self._incomplete.clear()
        self._agreed = True  # not before: a step that failed on the way here is agreed on again
        return True

    def show(self) -> None:
        for gradient in self.gradients:
            gradient.show()

    def clear(self) -> None:
        self._position = 0
        self._passed.clear()
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
            if not flat.gradient.complete:
                self._incomplete.add(flat)
            self._reduce(flat)

    def _reduce(self, flat: Flat) -> None:
        gradient = flat.gradient
        gradient.reduce()
        self._inflight.append(gradient)
        while len(self._inflight) >= (
            IN_FLIGHT if self._fabric.data_parallel > 1 else 1
        ):  # alone there is nothing to wait for
            self._inflight.popleft().settle()

    def _compare(self) -> None:
        """Makes the one agreement of a step: the maximum over the ranks of small integers.

        A pair (x, -x) tells whether all ranks have the same x.
        """
        lanes = self._fabric.lanes
        asked = [self.stop_asked, self._buffers.look()]
        alone = self._fabric.model.world == 1  # else buffers may be of a rank's part of the model
        same = [self._backwards, *(lane.hash for lane in lanes), self._buffers.shapes if alone else 0]
        flats = self.order
        used = [mark for flat in flats for mark in flat.gradient.used]
        waiting = [flat.gradient.unreduced for flat in flats]
        partial = [flat in self._incomplete for flat in flats]
        values = [*same, *(-value for value in same), *asked, *used, *waiting, *partial]
        agreed = deque(self._fabric.maximum([int(value) for value in values]))

        highest = [agreed.popleft() for _ in same]
        lowest = [-agreed.popleft() for _ in same]
        if highest[0] != lowest[0]:
            counts = self._fabric.gather_objects(self._backwards)
            raise DisagreementError(
                f"ranks ran different numbers of backward passes before step(): {_by_rank(counts)}; give every rank "
                "the same number of micro-batches"
            )
        self._buffers.uneven = highest[-1] != lowest[-1]
        for lane, high, low in zip(lanes, highest[1:-1], lowest[1:-1], strict=True):
            if high != low:
                raise DisagreementError(self._first_difference(lane))
        self.stop_agreed, self._buffers.differ = bool(agreed.popleft()), bool(agreed.popleft())
        for flat in flats:
            gradient = flat.gradient
            gradient.used = [bool(agreed.popleft()) for _ in gradient.used]
        for flat in flats:
            flat.gradient.awaited = bool(agreed.popleft())
        self._late |= {flat for flat in flats if agreed.popleft()}
        self._idle = {flat for flat in flats if not any(flat.gradient.used)}

    def _first_difference(self, lane: Lane) -> str:
        logs = self._fabric.gather_objects(list(lane.log))
        for place, entries in enumerate(zip(*logs, strict=False)):
            if len(set(entries)) > 1:
                return f"ranks did different collectives ({lane.name}, {place + 1}): {_by_rank(entries)}"
        return f"ranks did different numbers of collectives ({lane.name}): {_by_rank([len(log) for log in logs])}"


def _by_rank(values: Iterable[object]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
