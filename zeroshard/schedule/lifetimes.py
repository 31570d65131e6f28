"""When each unit is gathered, and when it is released.

In forward, a unit is gathered when its module is called and released after the call. In backward, it is gathered when
the gradient of its output arrives and released when the backward of another unit begins.

Units that will be needed next are gathered ahead of need, in the order of the last step. The first units of backward
are gathered while forward ends, and the first units of the next forward while the optimizer updates. If the order has
changed, a rank waits for a gather. Nothing else goes wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch

from ..config.options import Config
from ..states.flat import Flat
from ..states.unit import Graph, Unit
from ..system import compat, trace
from .order import Order


class Lifetimes:
    """Gathers and releases the units of one model."""

    def __init__(self, units: list[Unit], config: Config, *, sharded: bool) -> None:
        self._units, self._root = units, units[0]
        self._sharded, self._keep = sharded, config.keep
        self._ahead = config.units_ahead
        self._training, self._evaluation, self._backward = Order(), Order(), Order()
        self._forward = self._evaluation
        """The order of the forward that runs, or ran last."""
        self.called: set[Unit] = set()
        """Units that were needed since the last step."""
        self._turning: set[Unit] = set()
        """Units gathered at the end of forward, because backward begins with them."""
        self._unhooked: set[Unit] = set()
        """Units whose outputs have no ``grad_fn``. No hook tells when their backward is over."""
        self._in_backward: list[Unit] = []
        """Units whose backward has begun and may still run."""
        self._recomputed: list[Unit] = []
        """Units gathered by the last recomputation whose own backward has not begun."""
        self._recomputing = False
        self._read: list[Unit] = []
        """Units gathered because user code read them. No pass of the model needs them."""
        self._leaving: dict[Unit, tuple[int, list[bool]]] = {}
        """Units that hooks of the user may read after their forward. For each: how many tensors shared its memory when
        the forward ended, and which flats were lent."""
        self.second_backward = False
        """A backward with ``create_graph`` has run. All units will be needed once more, and nobody knows when."""

    def kept(self, unit: Unit) -> bool:
        """Whether a unit stays gathered from forward to backward."""
        if self._keep is not None:
            return unit.name in self._keep or unit.title in self._keep
        return unit is self._root or (bool(self._training.last) and unit is self._training.last[-1])

    def require(self, unit: Unit, following: Iterable[Unit] = (), way: str = "forward") -> None:
        """Waits until a unit is gathered. Starts to gather the units that follow."""
        self.called.add(unit)
        if unit in self._read:
            self._read.remove(unit)
        if self._leaving:
            self._leaving.pop(unit, None)
            self._end_leaving([])
        trace.phase(None)
        unit.gather()
        for other in following:
            other.prefetch()
        unit.wait()
        trace.phase(way, unit.title)

    def _release(self, unit: Unit) -> None:
        if self._sharded and not self.second_backward:
            unit.release()

    # -- reads by user code -----------------------------------------------------------------------------------------

    def read(self, units: list[Unit]) -> None:
        """Gathers units for user code. Units of earlier reads are released, so that reading a model needs one unit."""
        self._end_reads([unit for unit in self._read if unit not in units])
        self._end_leaving(units)
        absent = [unit for unit in units if not unit.present]
        for unit in units:
            unit.gather()
        for unit in units:
            unit.wait(watched=True)
            for flat in unit.flats:
                flat.lend()
        self._read += absent

    def stay_for_graph(self, units: list[Unit], graph: Graph) -> None:
        """User code used these units in a graph. They stay until its backward is over, or until the graph is gone."""
        self.called.update(units)
        for unit in units:
            unit.graphs.add(graph)

    def _end_reads(self, units: list[Unit]) -> None:
        self._read = [unit for unit in self._read if unit not in units]
        for unit in units:
            unit.release()

    def _end_graphs(self) -> None:
        """No backward needs what user code has read."""
        for unit in self._units:
            unit.graphs.clear()

    def release_all(self, doing: str) -> None:
        """Releases every unit, between two steps. Raises if a graph of user code needs one."""
        self._end_reads(self._read)
        self._end_leaving([])
        self._turning.clear()
        for unit in self._units:
            if unit.graphs:
                raise RuntimeError(
                    f"{doing} while a graph of yours needs parameters of {unit.title!r}, as a penalty does until its "
                    "backward; run that backward, or drop what was computed"
                )
            unit.release()

    # -- forward --------------------------------------------------------------------------------------------------

    def prepare_forward(self, outdated: Set[Flat]) -> None:
        """Gathers the first units of the next forward while the optimizer updates the others.

        Stops at the first unit that is not updated yet.
        """
        if self._sharded and self._training.last:
            for unit in (self._root, *self._training.last[: self._ahead]):
                if not outdated.isdisjoint(unit.flats) or any(flat.home.asynchronous for flat in unit.flats):
                    return
                unit.gather()

    def begin_forward(self) -> None:
        self._end_reads(self._read)
        self._end_leaving([])
        self._turning.clear()
        # Decided once for the whole model: reentrant checkpointing runs the first forward of a block without gradients.
        self._forward = self._training if torch.is_grad_enabled() else self._evaluation
        self._forward.begin()

    def enter_forward(self, unit: Unit) -> None:
        following = self._forward.enter(unit, self._ahead)
        if self._sharded and self._forward is self._training and self._forward.at_end:
            following = self._first_in_backward(unit)
            self._turning.update(following)
        self.require(unit, following)

    def _first_in_backward(self, last: Unit) -> list[Unit]:
        """The first units of backward, without the root, the last unit of forward, and kept units."""
        units = [unit for unit in self._backward.last if unit is not self._root and unit is not last]
        return [unit for unit in units if not self.kept(unit)][: self._ahead]

    def leave_forward(self, unit: Unit) -> None:
        if not (self._forward is self._training and self.kept(unit)):
            self._release(unit)

    def leave_after_hooks(self, unit: Unit) -> None:
        """Leaves a unit as soon as anything else is gathered. Until then, hooks of the user can read the unit."""
        if self._sharded:
            self._leaving[unit] = unit.sharing, [flat.lent for flat in unit.flats]
            unit.watch()

    def _end_leaving(self, staying: list[Unit]) -> None:
        for unit in [unit for unit in self._leaving if unit not in staying]:
            sharing, lent_before = self._leaving.pop(unit)
            if unit.sharing == sharing:  # hooks have stored no view, so they leave the memory to the unit
                for flat, lent in zip(unit.flats, lent_before, strict=True):
                    flat.lent = lent
            self.leave_forward(unit)

    def stay_until_backward_ends(self, unit: Unit) -> None:
        self._unhooked.add(unit)

    def end_forward(self) -> list[Unit]:
        """Releases all units that backward does not need first. Returns the order of a training forward."""
        self._forward.end()
        self._end_leaving([])
        for unit in self._units:
            if unit not in self._unhooked and unit not in self._turning:
                self.leave_forward(unit)
            unit.watch()
        return [self._root, *self._training.last] if self._forward is self._training else []

    # -- backward -------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        self._backward.begin()

    def require_in_backward(self, unit: Unit) -> None:
        if self._sharded:
            stays = unit is self._root and self.kept(unit)  # it needs no gather, so it does not count as one ahead
            self.require(unit, () if stays else self._backward.enter(unit, self._ahead), "backward")
        else:
            unit.unwatch()  # it may be recomputed
            trace.phase("backward", unit.title)

    def enter_backward(self, unit: Unit, enclosing: tuple[Unit, ...]) -> list[Unit]:
        """Returns the units whose backward is now over. ``enclosing`` are the units around this one."""
        self._recomputing = False
        if unit in self._recomputed:
            self._recomputed.remove(unit)
        self.require_in_backward(unit)
        over = [other for other in self._in_backward if other is not unit and other not in enclosing]
        for other in over:
            self._release(other)
        self._in_backward = [unit, *enclosing]
        return over

    def enter_recomputation(self, unit: Unit) -> None:
        """A unit runs its forward again, inside backward. It stays gathered until its own backward, which comes next.

        Until then the backward of another unit does not release it.
        """
        if not self._recomputing:  # a new part of the model: units of the previous part are not needed any more
            for other in self._recomputed:
                self._release(other)
            self._recomputed.clear()
            self._recomputing = True
        if unit not in self._in_backward and unit not in self._recomputed:
            self._recomputed.append(unit)
        self.require_in_backward(unit)

    def end_backward(self) -> None:
        self._backward.end()
        kept = compat.keeps_graph()
        self._leave_backward(
            second_expected=self.second_backward and (kept or torch.is_grad_enabled()), graphs_over=not kept
        )

    def abandon_backward(self) -> None:
        """Releases all units after a backward that raised."""
        self._leave_backward(second_expected=False, graphs_over=True)

    def _leave_backward(self, *, second_expected: bool, graphs_over: bool) -> None:
        self._in_backward.clear()
        self._recomputed.clear()
        self._recomputing = False
        self._unhooked.clear()
        self.second_backward = second_expected
        if graphs_over:
            self._end_graphs()
        for unit in self._units:
            self._release(unit)
            unit.watch()

    def begin_step(self) -> None:
        """Releases what user code has read: its values become old."""
        if self._sharded:
            self._end_graphs()
            self._end_reads(self._read)

    def end_step(self) -> None:
        self.called.clear()
        self.second_backward = False
