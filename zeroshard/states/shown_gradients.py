"""What ``parameter.grad`` shows between backward and step, and what the user did to it.

``parameter.grad`` shows the averaged gradient itself if that is whole, and a placeholder elsewhere. A user who sets it
to None or zeroes it discards the gradient. A user who puts another tensor there assigns a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..comm import parallel
from ..config.layout import Slot
from ..system import compat
from .placeholder import Placeholders


class _Display(NamedTuple):
    """What ``parameter.grad`` was given to show."""

    tensor: Tensor
    version: int
    pointer: int | None
    """Where the averaged gradient is; None if the tensor is a placeholder."""


class ShownGradients:
    """What the parameters of one flat show as their gradients."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], slots: Sequence[Slot], dtype: torch.dtype, placeholders: Placeholders
    ) -> None:
        self._parameters, self._slots, self._dtype, self._placeholders = parameters, slots, dtype, placeholders
        self._stand_ins: list[Tensor] | None = None
        self._displays: list[_Display | None] = [None] * len(parameters)

    def show(self, used: Sequence[bool], values: Tensor | None) -> None:
        """Gives each used parameter that shows nothing its part of ``values``, a whole flat, or a placeholder."""
        for index, parameter in enumerate(self._parameters):
            if used[index] and self._displays[index] is None:
                part = self._stand_in(index) if values is None else self._slots[index].view(values)
                tensor = parameter.grad = parallel.like(parameter, part)
                pointer = None if values is None else compat.pointer(parallel.local(tensor))
                self._displays[index] = _Display(tensor, compat.version(tensor), pointer)

    def take_back(self) -> Iterator[tuple[int, Tensor | None]]:
        """Leaves ``grad`` to autograd. Yields the gradient that the user assigned, or None if the user discarded it."""
        for index, parameter in enumerate(self._parameters):
            display, self._displays[index] = self._displays[index], None
            gradient, parameter.grad = parameter.grad, None
            if gradient is not (None if display is None else display.tensor):
                yield index, gradient
            elif display is not None and self._is_zeroed(index, display):
                yield index, None

    def clear(self) -> None:
        """Takes away the gradients that were shown. A gradient that the user assigned stays."""
        for index, display in enumerate(self._displays):
            if display is not None and self._parameters[index].grad is display.tensor:
                self._parameters[index].grad = None
            self._displays[index] = None

    def _stand_in(self, index: int) -> Tensor:
        """The placeholder of one gradient. The same one every step, unless somebody wrote to it."""
        if self._stand_ins is None:
            self._stand_ins = self._placeholders.gradients([slot.shape for slot in self._slots], self._dtype)
        return self._stand_ins[index]

    def _is_zeroed(self, index: int, display: _Display) -> bool:
        """Whether a placeholder was zeroed. Raises if it was changed in another way.

        On a GPU the value is read only if the version says that somebody wrote, because reading waits for the GPU.
        """
        part = parallel.local(display.tensor)
        if display.pointer is not None and compat.pointer(part) == display.pointer:
            return False  # the averaged gradient itself, which users may change
        written = compat.version(display.tensor) != display.version
        if not written and (part.is_cuda or compat.is_fake(part) or not part.numel()):
            return False
        value = float(part.flatten()[0]) if part.numel() else 0.0
        if not written and math.isnan(value):
            return False
        self._stand_ins = None  # somebody wrote to this placeholder
        if value != 0:
            raise RuntimeError(
                f"the gradient of {self._slots[index].name!r} was changed in place, but gradients are sharded or "
                "scaled here and the change would be lost; clip with clip_grad_norm= or optimizer.clip_grad_norm_()"
            )
        return True
