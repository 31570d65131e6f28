"""When gradients are reduced, and how ranks stay together although they use different parameters.

- Every backward reduces every flat once. All ranks reduce in the same order. A flat is reduced as soon as it is ready
  and all flats before it in the order are reduced. The remaining flats are reduced when backward ends.
- A flat is ready when all its gradients have come, and the order is the one in which rank 0's flats became ready in its
  first backward. So the head of a language model is reduced first, and its embedding last, although both are in the
  root unit. Until that order is known, it is the reverse of ``modules()``.
- If the host publishes parameters during backward, the order is the reverse of rank 0's first forward, which has the
  root last: a block that is recomputed later may still read a parameter of the root.
- Stage 3 is different, because there a backward gathers too: if one rank waited for a gradient and another rank for a
  gather, both would hang. So in stage 3 a flat is ready when the backward of the next unit begins. That happens at the
  same point on all ranks, whatever parameters they used. The order is the reverse of rank 0's first forward.
- Once a step the ranks agree, with one small all-reduce: which parameters any rank used, which flats have gradients
  that came too late, and whether all ranks did the same operations. Late gradients are then reduced in ``step()``.
- A flat that was incomplete once is *late*: from then on it waits for the end of backward, so that no other flat waits
  for it. A flat that no rank used is *idle*: it is left out until a rank uses it.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from ..comm.fabric import DisagreementError, Fabric
from ..comm.lane import Lane
from ..config.bounds import IN_FLIGHT
from ..states.buffers import Buffers
from ..states.flat import Flat
from ..states.gradient import FlatGradient, hide_all
from ..states.unit import Unit


class Reducer:
    """Reduces the gradients of all trainable flats."""

    def __init__(
        self, units: Sequence[Unit], fabric: Fabric, buffers: Buffers, *, by_position: bool, root_last: bool
    ) -> None:
        """``root_last``: parameters are published during backward, so the root's flats are reduced last."""
        self._fabric, self._buffers, self._root_last = fabric, buffers, root_last
        self._by_position = by_position
        """Stage 3: a flat is ready when the backward of the next unit begins, not when all its gradients have come."""
        self.flats = [flat for unit in units for flat in unit.trainable_flats]
        self.gradients = [flat.gradient for flat in self.flats]
        self._root = set(units[0].trainable_flats)
        self.order: list[Flat]
        """The order in which flats are reduced. Equal on all ranks."""
        self._set_order(self.flats[::-1])
        self._proposal: list[Flat] | None = None
        self._completed: list[Flat] = []
        """Flats in the order in which their gradients came, until the ranks agree on an order."""
        self._ordered = False
        self._late: set[Flat] = set()
        self._idle: set[Flat] = set()
        self._early = self.order
        """Flats that are reduced as soon as they are ready: neither late nor idle."""
        self._position = 0
        """How many of the early flats are reduced."""
        self._ready: set[Flat] = set()
        self._incomplete: set[Flat] = set()
        """Early flats that were reduced in this step before all their gradients had come."""
        self._inflight: deque[FlatGradient] = deque()
        self._most_inflight = IN_FLIGHT if fabric.data_parallel > 1 else 1  # one rank alone has nothing to wait for
        self._backwards = 0
        self.agreed = False
        """Whether the ranks have agreed since the last backward."""
        self.synchronous = True
        """False inside ``no_sync``: gradients stay on their rank."""
        self.stop_asked = False
        """This rank wants training to end. The next agreement tells the others."""
        self.stop_agreed = False
        """Some rank wanted training to end when the ranks last agreed. The same on all ranks."""

        self.recompute_asked = self.recompute_agreed = -1
        """How many blocks this rank must recompute, and the maximum when the ranks last agreed. -1: it is not asked."""

    @property
    def backwards(self) -> int:
        """The number of backward passes until now."""
        return self._backwards

    def propose_order(self, forward: list[Unit]) -> None:
        """Remembers the order of the first forward. In the first agreement all ranks take rank 0's order."""
        if self._proposal is None:
            met = dict.fromkeys(flat for unit in forward for flat in unit.trainable_flats)
            missed = [flat for flat in self.flats if flat not in met]
            self._proposal = [*missed, *met][::-1]

    def _settle_order(self) -> None:
        if not self._ordered:
            came = [] if self._by_position or self._root_last else self._completed
            order = None if self._proposal is None else dict.fromkeys([*came, *self._proposal])
            labels = None if order is None else [flat.label for flat in order]
            proposed = self._fabric.from_rank_zero(labels)
            if proposed is not None:
                by_label = {flat.label: flat for flat in self.flats}
                self._set_order([by_label[label] for label in proposed])
            self._ordered = True
            self._completed = []

    def _set_order(self, order: list[Flat]) -> None:
        self.order = order
        forward = order[::-1]
        self._publishing_order = sorted(forward, key=lambda flat: flat not in self._root)

    def publishing_order(self) -> list[Flat]:
        """The order in which updates are published and forward needs them. A new list only if the order changes.

        The root's flats come first, because a forward waits for them as it begins. Then comes the reverse of ``order``.
        """
        return self._publishing_order

    def begin_backward(self) -> None:
        self._check_not_lent("a backward")
        self._backwards += 1
        self.agreed = False
        hide_all(self.gradients)
        for gradient in self.gradients:
            gradient.begin_backward()

    def passed(self, unit: Unit) -> None:
        """The backward of another unit has begun, so the backward of this unit is over."""
        if self._by_position:
            self._advance(unit.trainable_flats)

    def completed(self, flat: Flat) -> None:
        """All gradients of a flat have come."""
        if not self._ordered:
            self._completed.append(flat)
        if not self._by_position:
            self._advance([flat])

    def end_backward(self) -> None:
        if self.synchronous:
            self._advance(self._early)
            for flat in self.order:
                if flat in self._late and flat not in self._idle:
                    self._reduce(flat)
        self._begin_order()
        several = self._fabric.data_parallel > 1 and any(any(gradient.used) for gradient in self.gradients)
        for flat in self.flats:
            if flat.home.takes_early:
                flat.gradient.settle()
            flat.gradient.expose(everything=several)

    def agree(self, purpose: str) -> bool:
        """Brings all ranks to the same averaged gradients and the same list of used parameters.

        ``step()`` does this, and whoever asks something of the gradients before. All ranks must have one ``purpose``.
        Returns False if there was no backward since the last agreement.
        """
        self._check_not_lent(purpose)
        for gradient in self.gradients:
            gradient.read_changes()
        self._begin_order()
        self.stop_agreed, self.recompute_agreed = self.stop_asked, self.recompute_asked
        if self._fabric.world > 1:
            self._compare(purpose)
        for flat in self.order:
            if flat.gradient.unreduced:
                self._reduce(flat)
        self._settle_order()
        self._early = [flat for flat in self.order if flat not in self._late and flat not in self._idle]
        self._inflight.clear()
        for gradient in self.gradients:
            gradient.settle()
            gradient.apply_mapped()
            gradient.show()  # what the user assigned shows its part now
        self._incomplete.clear()
        is_new, self.agreed = not self.agreed, True
        return is_new

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, ``parameter.grad`` shows whole gradients. Comes after an agreement. Collective."""
        try:
            for flat in self.order:
                flat.gradient.lend()
            yield
        finally:
            for flat in self.order:
                if flat.gradient.lent:
                    flat.gradient.take_lent()

    def _check_not_lent(self, purpose: str) -> None:
        if any(gradient.lent for gradient in self.gradients):
            raise RuntimeError(f"{purpose} inside `with zeroshard.gathered_gradients(...)`; leave the block first")

    def clear(self) -> None:
        """Forgets all gradients."""
        self._begin_order()
        self._inflight.clear()
        self._incomplete.clear()
        self.agreed = False
        for gradient in self.gradients:
            gradient.clear()

    def _begin_order(self) -> None:
        self._position = 0
        self._ready.clear()

    def _advance(self, ready: Iterable[Flat]) -> None:
        """Reduces the flats whose turn has come, now that some more are ready."""
        self._ready.update(ready)
        while self.synchronous and self._position < len(self._early):
            flat = self._early[self._position]
            if flat not in self._ready:
                return
            self._position += 1
            if not flat.gradient.complete:
                self._incomplete.add(flat)
            self._reduce(flat)

    def _reduce(self, flat: Flat) -> None:
        gradient = flat.gradient
        gradient.reduce()
        self._inflight.append(gradient)
        while len(self._inflight) >= self._most_inflight:
            self._inflight.popleft().settle()

    # -- agreement ------------------------------------------------------------------------------------------------

    def _compare(self, purpose: str) -> None:
        """Makes one agreement: the maximum over the ranks of small integers.

        All ranks have the same x if the maximum of x is minus the maximum of -x.
        """
        lanes = self._fabric.lanes
        written = self._buffers.look()
        # Tensor-parallel ranks may have buffers of different shapes, because each has a part of the model.
        shapes = self._buffers.shapes if self._fabric.model.world == 1 else 0
        changes = sum(gradient.changes for gradient in self.gradients) % 2**62
        same = [zlib.crc32(purpose.encode()), self._backwards, changes, shapes, *(lane.hash for lane in lanes)]
        values = [*same, *(-value for value in same), self.stop_asked, self.recompute_asked, written]
        for flat in self.order:
            gradient = flat.gradient
            values += [*gradient.used, gradient.unreduced, flat in self._incomplete]
        where = f"the agreement on gradients, in {purpose}"
        agreed = iter(self._fabric.maximum([int(value) for value in values], where))

        highest, negated = list(islice(agreed, len(same))), list(islice(agreed, len(same)))
        differ = [high != -low for high, low in zip(highest, negated, strict=True)]
        if differ[0]:
            purposes = self._fabric.gather_objects(purpose)
            raise DisagreementError(
                f"ranks do different things with their gradients: {_by_rank(purposes)}; all ranks must "
                "ask the same of their gradients, in the same order: compute a log on every rank, and write it on one"
            )
        if differ[1]:
            counts = self._fabric.gather_objects(self._backwards)
            raise DisagreementError(
                f"ranks ran different numbers of backward passes before step(): {_by_rank(counts)}; give every rank "
                "the same number of micro-batches"
            )
        if differ[2]:
            raise DisagreementError(
                "ranks changed, zeroed or assigned the gradients of different parameters, or in different ways: "
                f"{self._unevenly_changed()}; do the same on all ranks"
            )
        for lane, lane_differs in zip(lanes, differ[4:], strict=True):
            if lane_differs:
                raise DisagreementError(self._first_difference(lane))
        self._buffers.uneven = differ[3]
        self.stop_agreed, self.recompute_agreed = bool(next(agreed)), next(agreed)
        self._buffers.differ = bool(next(agreed)) or self._buffers.differ  # an earlier agreement of this step counts
        self._idle = set()
        for flat in self.order:
            gradient = flat.gradient
            gradient.used = list(map(bool, islice(agreed, len(gradient.used))))
            gradient.awaited = bool(next(agreed))
            if next(agreed):
                self._late.add(flat)
            if not any(gradient.used):
                self._idle.add(flat)

    def _unevenly_changed(self) -> str:
        """Names the flats whose gradients were changed differently on some ranks."""
        everybody = self._fabric.gather_objects({flat.label: flat.gradient.changes for flat in self.flats})
        labels = [label for label in everybody[0] if len({changes[label] for changes in everybody}) > 1]
        return f"units {', '.join(map(repr, labels))}"

    def _first_difference(self, lane: Lane) -> str:
        logs = self._fabric.gather_objects(list(lane.log))
        for place, entries in enumerate(zip(*logs, strict=False)):
            if len(set(entries)) > 1:
                return f"ranks did different collectives ({lane.name}, {place + 1}): {_by_rank(entries)}"
        return f"ranks did different numbers of collectives ({lane.name}): {_by_rank([len(log) for log in logs])}"


def _by_rank(values: Sequence[object]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
