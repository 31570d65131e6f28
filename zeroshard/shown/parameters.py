"""What the model's parameters show: their part of a gathered flat, or a placeholder. Also finds users' writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..comm import parallel
from ..config.layout import Slot
from ..system import compat
from .absent import mark_absent, mark_present
from .placeholder import Placeholders


class ShownParameters:
    """The parameters of one flat: the objects stay, the memory behind them changes."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], slots: Sequence[Slot], dtype: torch.dtype, placeholders: Placeholders
    ) -> None:
        self._parameters, self._slots, self._dtype = parameters, slots, dtype
        self._plain = all(parallel.local(parameter) is parameter for parameter in parameters)
        self.views: list[Tensor] = []
        """The parameters' places in the whole flat, whether or not the flat has memory now."""
        self._stand_ins = [placeholders.parameter(slot.shape, dtype) for slot in slots]
        self._pointers: list[int] = []
        """Where the parameters point since the last ``show``."""
        self._versions: list[int] = []
        self.watched = False
        """Every use of the parameters is seen (``absent.py``), whether or not they point at their values."""

    def show(self, *, watched: bool = False) -> None:
        """Points the parameters at their values. ``watched``: for user code, whose every use is seen."""
        self._point(self.views)
        self._pointers = compat.pointers(self.views)
        self.accept_writes()
        if watched:
            self.watch()
        else:
            self.unwatch()

    def hide(self) -> None:
        """Points the parameters at placeholders. Every use of them then asks for the values."""
        self._point(self._stand_ins)
        self.watch()

    def watch(self) -> None:
        self.watched = True
        mark_absent(self._parameters)

    def unwatch(self) -> None:
        self.watched = False
        mark_present(self._parameters)

    def outdate(self) -> None:
        """Notes that the parameters change, so that a backward through their old values raises."""
        torch.autograd.graph.increment_version(self._parameters)
        self.accept_writes()

    def accept_writes(self) -> None:
        """Notes that all writes until now are known."""
        with compat.plain():
            self._versions = compat.versions(self._parameters)

    def take_written_names(self) -> list[str]:
        """Names of parameters that were written in place. Accepts these writes."""
        before = self._versions
        self.accept_writes()
        changed = zip(self._slots, before, self._versions, strict=True)
        return [slot.name for slot, old, new in changed if old != new]

    def check(self, *, writes_count: bool) -> None:
        """Raises if a parameter that is shown was pointed elsewhere, or written to where the write would be lost.

        ``writes_count``: writes are not lost.
        """
        with compat.plain():
            self._check(writes_count=writes_count)

    def _check(self, *, writes_count: bool) -> None:
        parts = self._parameters if self._plain else [parallel.local(parameter) for parameter in self._parameters]
        if compat.pointers(parts) == self._pointers and compat.versions(self._parameters) == self._versions:
            return
        facts = zip(self._slots, self._parameters, parts, self._versions, self._pointers, strict=True)
        for slot, parameter, part, version, pointer in facts:
            if compat.pointer(part) != pointer or part.dtype is not self._dtype or part.shape != slot.shape:
                self._point(self.views)
                self.accept_writes()
                raise RuntimeError(
                    f"parameter {slot.name!r} was pointed at other memory after shard(), by a conversion or by an "
                    "assignment to .data; convert the model before shard(), and write values inside `with "
                    "zeroshard.gathered(model, write=True):`"
                )
            if compat.version(parameter) != version and not writes_count:
                self.accept_writes()
                raise RuntimeError(
                    f"parameter {slot.name!r} was written to where the write would be lost; "
                    "write inside `with zeroshard.gathered(model, write=True):`"
                )

    def _point(self, tensors: Sequence[Tensor]) -> None:
        if self._plain:
            compat.set_data(self._parameters, tensors)
            return
        with compat.plain():
            for parameter, tensor in zip(self._parameters, tensors, strict=True):
                compat.point(parameter, tensor)
