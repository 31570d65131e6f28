"""What ``parameter.grad`` shows between backward and step, and what the user did to it.

It shows the averaged gradient itself where that is whole, and a placeholder elsewhere. Taking it away or zeroing it
discards the gradient; another tensor in its place is the user's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..comm import parallel
from ..config.layout import Slot
from ..system import compat
from .placeholder import Placeholders


class _Shown(NamedTuple):
    """What ``parameter.grad`` was given to show."""

    tensor: Tensor
    version: int
    pointer: int
    values: Tensor | None
    """The averaged gradient that it is a part of; None if it is a placeholder."""


class ShownGradients:
    """Of the parameters of one flat."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], slots: Sequence[Slot], dtype: torch.dtype, placeholders: Placeholders
    ) -> None:
        self._parameters, self._slots, self._dtype, self._placeholders = parameters, slots, dtype, placeholders
        self._stand_ins: list[Tensor] | None = None
        self._shown: list[_Shown | None] = [None] * len(parameters)

    def show(self, used: Sequence[bool], values: Tensor | None) -> None:
        """Gives the parameters in use that show nothing their part of ``values``, a whole flat, or a placeholder."""
        for index, is_used in enumerate(used):
            if is_used and self._shown[index] is None:
                parameter = self._parameters[index]
                tensor = self._slots[index].view(values) if values is not None else self._stand_in(index)
                tensor = parallel.like(parameter, tensor)
                parameter.grad = tensor
                place = compat.pointer(parallel.local(tensor))
                self._shown[index] = _Shown(tensor, compat.version(tensor), place, values)

    def take_back(self, held: Callable[[], Tensor | None]) -> Iterator[tuple[int, Tensor | None]]:
        """Leaves ``grad`` to autograd; gives what the user assigned, or None where the gradient was discarded.

        ``held`` is the averaged gradient at that moment, which the caller may change on the way.
        """
        for index, parameter in enumerate(self._parameters):
            entry, self._shown[index] = self._shown[index], None
            gradient, parameter.grad = parameter.grad, None
            if entry is None:
                if gradient is not None:
                    yield index, gradient
            elif gradient is None:
                yield index, None
            elif gradient is not entry.tensor:
                yield index, gradient
            elif not _still_shows(entry, held()) and self._touched(index, entry.tensor, entry.version):
                yield index, None

    def clear(self) -> None:
        """Takes away what was shown, and leaves what was assigned."""
        for index, entry in enumerate(self._shown):
            if entry is not None and self._parameters[index].grad is entry.tensor:
                self._parameters[index].grad = None
            self._shown[index] = None

    def _stand_in(self, index: int) -> Tensor:
        """The placeholder of one gradient. The same one every step, unless it was written to."""
        if self._stand_ins is None:
            self._stand_ins = self._placeholders.gradients([slot.shape for slot in self._slots], self._dtype)
        return self._stand_ins[index]

    def _touched(self, index: int, shown: Tensor, version: int) -> bool:
        """Whether a placeholder was zeroed. Its value is looked at only where that costs no wait, or is called for."""
        part = parallel.local(shown)
        if compat.version(shown) == version and (part.is_cuda or compat.is_fake(part) or not part.numel()):
            return False
        value = float(part.flatten()[0]) if part.numel() else 0.0
        if compat.version(shown) == version and math.isnan(value):
            return False
        self._stand_ins = None  # this one is spoilt
        if value != 0:
            raise RuntimeError(
                f"the gradient of {self._slots[index].name!r} was changed in place, but gradients are sharded or "
                "scaled here and the change would be lost; clip with clip_grad_norm= or optimizer.clip_grad_norm_()"
            )
        return True


def _still_shows(shown: _Shown, held: Tensor | None) -> bool:
    """Whether what was shown is the averaged gradient, where it was."""
    if shown.values is None or shown.values is not held:
        return False
    return compat.pointer(parallel.local(shown.tensor)) == shown.pointer
