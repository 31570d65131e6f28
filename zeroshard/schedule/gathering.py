"""Whole parameters outside of passes: for a block of user code, or one unit after the other."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..comm import parallel
from ..comm.fabric import Fabric
from ..states.flat import Flat
from ..states.unit import Unit


class Gathering:
    """Gathers units for others than forward and backward, and releases them again. Collective."""

    def __init__(
        self,
        units: Sequence[Unit],
        fabric: Fabric,
        *,
        check_awake: Callable[[str], None],
        finish_updates: Callable[[], None],
    ) -> None:
        """``check_awake`` raises while states are on the host. ``finish_updates`` waits for updates under way."""
        self._units, self._fabric = units, fabric
        self._check_awake, self._finish_updates = check_awake, finish_updates

    @contextmanager
    def gathered(self, units: Sequence[Unit], *, write: bool = False, lend: bool = False) -> Iterator[None]:
        """Inside, units are present. ``lend``: user code reads them. ``write``: at the end rank 0's values count.

        Units that were present before, because backward needs them for example, stay present.
        """
        self._check_awake("gathered()")
        during, flats = self._fabric.watchdog.during, [flat for unit in units for flat in unit.flats]
        if write:
            self._finish_updates()  # otherwise a delayed update would overwrite the user's values
        if lend and not write:
            for flat in flats:
                flat.writes.accept()  # otherwise the end of the block would find them
        absent, opened = [unit for unit in units if not unit.present], list[Unit]()
        watched = [flat for flat in flats if flat.watched]
        try:
            with during("gathered()"):
                for unit in units:
                    unit.gather()
                    unit.open_blocks += 1
                    opened.append(unit)
                for unit in units:
                    unit.wait()
                for flat in flats:
                    if lend:
                        flat.lend()
                    if write or (lend and not flat.sharded):
                        flat.home.before_write()
            yield
        finally:  # also after an exception: the other ranks come here too, and the collectives below need all ranks
            written = [name for flat in flats for name in flat.writes.take_names()] if lend else []
            written += [flat.label for flat in flats if flat.writes.past_autograd()]
            with during("the end of a gathered() block"):
                if write or (lend and self._fabric.maximum([bool(written)], "the agreement on writes")[0]):
                    with torch.no_grad():
                        for flat in flats:
                            if write or not flat.sharded:
                                flat.rewrite()
            for flat in flats:
                flat.home.after_write()
            for unit in opened:
                unit.open_blocks -= 1
            for unit in absent:
                unit.release()
            for flat in watched:
                flat.watch()
        if written and not write:
            raise RuntimeError(
                f"parameter {written[0]!r} was written to inside `zeroshard.gathered(...)`, which is for reading; pass "
                "write=True if rank 0's change is to count on all ranks"
            )

    def whole_parameters(self, wanted: Container[int] | None = None) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every parameter with its whole values. They are valid until the next parameter comes: one unit is gathered.

        ``wanted`` has the ``id`` of each parameter to give, the same on all ranks. Flats that have none of them are not
        gathered. All ranks must iterate to the end.
        """
        for unit in self._units:
            flats = [flat for flat in unit.flats if wanted is None or any(id(p) in wanted for p in flat.parameters)]
            with self.gathered([unit]) if flats == unit.flats else self._gathered_flats(flats):
                for parameter in (parameter for flat in flats for parameter in flat.parameters):
                    if wanted is None or id(parameter) in wanted:
                        yield parameter, parallel.whole(parameter, parallel.local(parameter)).detach()

    @contextmanager
    def _gathered_flats(self, flats: list[Flat]) -> Iterator[None]:
        """Inside, some flats of a unit are present, and the others stay as they are."""
        self._check_awake("gathered()")
        absent, watched = [flat for flat in flats if not flat.present], [flat for flat in flats if flat.watched]
        try:
            with self._fabric.watchdog.during("gathered()"):
                for flat in flats:
                    flat.gather()
                for flat in flats:
                    flat.wait()
            yield
        finally:
            for flat in absent:
                flat.release()
            for flat in watched:
                flat.watch()

    def whole_units(self) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
        """Copies of the whole parameters of one unit after the other. Between two units nothing is gathered.

        Collective for each unit.
        """
        for unit in self._units:
            with self._fabric.watchdog.during("whole_parameters()"), torch.no_grad():
                with self.gathered([unit]):
                    found = [(parameter, _copied(parameter)) for flat in unit.flats for parameter in flat.parameters]
                self._fabric.watchdog.check()  # a gather that was aborted meanwhile has not brought its values
            yield found


def _copied(parameter: nn.Parameter) -> Tensor:
    """A copy of a parameter that is present; with tensor parallelism of the whole parameter."""
    local = parallel.local(parameter).detach()
    whole = parallel.whole(parameter, local)
    return whole.clone() if whole is local else whole
