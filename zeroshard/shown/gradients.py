"""What ``parameter.grad`` shows between backward and step, and what the user did to it.

``parameter.grad`` shows the averaged gradient itself if that is whole, and a stand-in elsewhere
(``sharded_gradient.py``). A user who sets it to None discards the gradient. A user who puts another tensor there
assigns a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import repeat
from operator import is_

import torch
from torch import Tensor, nn

from ..comm import parallel
from ..config.layout import Slot
from ..system import compat
from .placeholder import Placeholders
from .sharded_gradient import Owner, ShardedGradient


class ShownGradients:
    """What the parameters of one flat show as their gradients."""

    def __init__(
        self,
        owner: Owner,
        parameters: Sequence[nn.Parameter],
        slots: Sequence[Slot],
        dtype: torch.dtype,
        placeholders: Placeholders,
    ) -> None:
        self._owner = weakref.ref(owner)
        self._parameters, self._slots, self._dtype, self._placeholders = parameters, slots, dtype, placeholders
        self._plain = all(parallel.local(parameter) is parameter for parameter in parameters)
        self._stand_ins: list[Tensor] = []
        """Made once. The same ones every step."""
        self._displays: list[Tensor | None] = [None] * len(parameters)
        self._pointers: list[int | None] = [None] * len(parameters)
        """Where the averaged gradient is that a parameter shows. None for a stand-in."""
        self._real = False
        """Whether some parameter shows the averaged gradient itself, whose memory users may replace."""

    def shows(self, index: int) -> bool:
        """Whether a parameter shows a gradient."""
        return self._displays[index] is not None

    def lacks(self, there: Sequence[bool]) -> bool:
        """Whether a parameter whose gradient is there shows nothing."""
        if not any(there) or not any(map(is_, self._displays, repeat(None))):
            return False  # the usual cases, asked three times a step
        return any(display is None and is_there for display, is_there in zip(self._displays, there, strict=True))

    def show(self, there: Sequence[bool], values: Tensor | None) -> None:
        """Gives each parameter whose gradient is there a part of ``values``, a whole flat, or a stand-in."""
        missing = [index for index, display in enumerate(self._displays) if there[index] and display is None]
        self._real = self._real or values is not None
        if values is None:
            made = self._standing()
            shown = [made[index] for index in missing]
        else:
            shown = [parallel.like(self._parameters[index], self._slots[index].view(values)) for index in missing]
        for index, tensor in zip(missing, shown, strict=True):
            self._displays[index] = tensor
            self._pointers[index] = None if values is None else compat.pointer(parallel.local(tensor))
        compat.set_grads([self._parameters[index] for index in missing], shown)

    def changes(self) -> dict[int, Tensor | None]:
        """Each gradient that the user assigned, and None for each that the user discarded, by index.

        These parameters then show nothing, until the next ``show``.
        """
        now = compat.grads(self._parameters)
        if all(map(is_, now, self._displays)) and not self._moved(now):  # the usual case, asked three times a step
            return {}
        found = {index: gradient for index, gradient in enumerate(now) if self._differs(index, gradient)}
        for index in found:
            self._displays[index] = None
        self._show_nothing(list(found))
        return found

    def _moved(self, now: list[Tensor | None]) -> bool:
        """Whether a user may have put other memory behind one of the gradients that are shown."""
        if not self._real or None in self._pointers:
            return self._real  # if some show stand-ins or nothing, all are looked at one by one
        shown = [gradient for gradient in now if gradient is not None]
        return compat.pointers(shown if self._plain else list(map(parallel.local, shown))) != self._pointers

    def _differs(self, index: int, gradient: Tensor | None) -> bool:
        """Whether a user put another gradient in the place of the one that was shown, or other memory behind it."""
        if gradient is not self._displays[index]:
            return True
        pointer = self._pointers[index]
        return gradient is not None and pointer is not None and compat.pointer(parallel.local(gradient)) != pointer

    def assigned(self, index: int) -> Tensor | None:
        """The gradient that a user has assigned to one parameter. None if there is none."""
        (gradient,) = compat.grads([self._parameters[index]])
        return gradient if gradient is not self._displays[index] else None

    def show_again(self, index: int) -> None:
        """Shows the gradient in the place of the one that the user assigned."""
        compat.set_grads([self._parameters[index]], [self._displays[index]])

    def hide(self) -> None:
        """Leaves ``grad`` to autograd."""
        self._show_nothing([index for index, display in enumerate(self._displays) if display is not None])
        self._displays, self._real = [None] * len(self._displays), False

    def take_back(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """Hides all gradients. Returns what each parameter was given to show, and what it shows now."""
        found = list(zip(self._displays, compat.grads(self._parameters), strict=True))
        compat.set_grads(self._parameters, [None] * len(self._parameters))
        self._displays, self._real = [None] * len(self._displays), False
        return found

    def clear(self) -> None:
        """Takes away the gradients that were shown. A gradient that the user assigned stays."""
        now = zip(self._parameters, compat.grads(self._parameters), self._displays, strict=True)
        shown = [parameter for parameter, gradient, display in now if gradient is display is not None]
        compat.set_grads(shown, [None] * len(shown))
        self._displays, self._real = [None] * len(self._displays), False

    def _show_nothing(self, indices: Sequence[int]) -> None:
        compat.set_grads([self._parameters[index] for index in indices], [None] * len(indices))

    def _standing(self) -> list[Tensor]:
        if not self._stand_ins:
            scalar = self._placeholders.parameter((), self._dtype)
            shapes = [tuple(parameter.shape) for parameter in self._parameters]
            if compat.is_fake(scalar):  # a dry run has no values that could be missed
                self._stand_ins = [scalar.expand(shape) for shape in shapes]
            else:
                made = [ShardedGradient.make(self._owner, i, scalar, shape) for i, shape in enumerate(shapes)]
                self._stand_ins = list(made)
        return self._stand_ins
