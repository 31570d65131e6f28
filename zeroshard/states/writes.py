"""What user code writes to the parameters of a flat: writes that count, and writes that would be lost.

A write lasts where parameters are whole at rest and have no master. ``load_state_dict()`` may write everywhere: each
rank takes its part of what is loaded. Any other write would be lost, and is refused. Autograd counts most writes in a
tensor's version. A fingerprint finds the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..shown.fingerprint import fingerprint

if TYPE_CHECKING:
    from .flat import Flat


class Writes:
    """Looks for writes of user code to the parameters of one flat."""

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self._fingerprint: Tensor | None = None
        """Of parameters that user code may write to past autograd: through ``.data``, ``to_local()`` or numpy."""
        self._loading = False
        """``load_state_dict()`` writes. What it has written counts at the latest when the parameters are released."""

    def expect(self) -> None:
        """From now on, looks for writes past autograd."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self._flat.whole)

    def past_autograd(self) -> bool:
        """Whether user code wrote past autograd since ``expect``. Waits for the device, and looks no more."""
        before, self._fingerprint = self._fingerprint, None
        return before is not None and bool(fingerprint(self._flat.whole) != before)

    def forget(self) -> None:
        """Looks for writes past autograd no more."""
        self._fingerprint = None

    def check(self) -> None:
        """Raises if somebody wrote to a parameter where the write would be lost.

        A write is lost if it goes to gathered parameters that are about to be released, or to parameters that have a
        separate master. Absent parameters refuse a write themselves.
        """
        self.check_versions()
        self.check_data()

    def check_versions(self) -> None:
        """``check`` for writes that autograd counts."""
        if self._flat.present:
            self._flat.shown.check(writes_count=self._flat.takes_writes)

    def check_data(self) -> None:
        """``check`` for writes past autograd."""
        if self.past_autograd():
            raise self.lost()

    def lost(self) -> RuntimeError:
        """The error of a user who wrote past autograd."""
        return RuntimeError(
            f"a parameter of {self._flat.label!r} was written to through .data, to_local() or numpy, where the write "
            "would be lost; write inside `with zeroshard.gathered(model, write=True):`"
        )

    def accept(self) -> None:
        """Takes the writes until now, where writes last. Raises elsewhere."""
        self.check()
        self._flat.shown.accept_writes()

    def take_names(self) -> list[str]:
        """Names of parameters that were written in place since the last call."""
        return self._flat.shown.take_written_names()

    def begin_load(self) -> None:
        """Called before ``load_state_dict()`` writes to parameters that are present, on all ranks."""
        self._flat.wait()
        self.forget()
        self._flat.home.before_write()
        self._loading = True

    def end_load(self) -> None:
        """Takes what ``load_state_dict()`` has written."""
        if self._loading:
            self._loading = False
            with torch.no_grad():
                self._flat.take_written()
            self._flat.home.after_write()
            self._flat.watch()
