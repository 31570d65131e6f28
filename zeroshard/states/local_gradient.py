"""The gradients that this rank computed for one flat, until they are reduced."""

from __future__ import annotations

from enum import Enum, auto
from itertools import compress

import torch
from torch import Tensor

from ..config.bounds import DEPOSIT_BYTES
from ..config.layout import FlatLayout
from ..shown.factors import Factors, apply
from ..system import compat


class Arrival(Enum):
    """How far one parameter's gradient has come on this rank.

    The usual way is MISSING → WAITING → DEPOSITED, and MISSING again when the buffer is taken to be reduced. If the
    buffer is not taken, the next backward pass turns DEPOSITED into EARLIER. A gradient that comes then is added, and
    EARLIER turns into DEPOSITED. A gradient that a user drops is MISSING.
    """

    MISSING = auto()
    """This rank has no gradient of the parameter."""
    WAITING = auto()
    """Autograd gave the gradient in this backward pass. It waits to be copied together with others."""
    DEPOSITED = auto()
    """The gradient is in the buffer. A part of it, or all, came in this backward pass."""
    EARLIER = auto()
    """The gradient is in the buffer. All of it came in earlier backward passes."""


IN_BUFFER = (Arrival.DEPOSITED, Arrival.EARLIER)


class LocalGradient:
    """A whole flat that receives this rank's gradients as autograd gives them.

    The buffer is made in the dtype of reducing. It becomes wider where gradients are added up.
    """

    def __init__(
        self, layout: FlatLayout, *, dtype: torch.dtype, accumulate: torch.dtype, device: torch.device
    ) -> None:
        self._layout, self._dtype, self._accumulate, self._device = layout, dtype, accumulate, device
        self._arrivals = [Arrival.MISSING] * len(layout.slots)
        self._came = 0
        """How many parameters are WAITING or DEPOSITED."""
        self._waiting: dict[int, Tensor] = {}
        self._waiting_bytes = 0
        self._buffer: Tensor | None = None
        self._slots: list[Tensor] = []
        """The parameters' places in the buffer."""

    @property
    def complete(self) -> bool:
        """Every parameter has its gradient of this backward pass."""
        return self._came == len(self._arrivals)

    @property
    def empty(self) -> bool:
        return self._buffer is None and not self._waiting

    def tensors(self) -> list[Tensor]:
        """The memory in use."""
        return [*self._waiting.values(), *([] if self._buffer is None else [self._buffer])]

    def begin_backward(self) -> None:
        """A new backward pass: no parameter has its gradient of this pass yet."""
        self._deposit()
        if self._buffer is not None:  # else nothing has come since the buffer was taken
            self._arrivals = [Arrival.EARLIER if a in IN_BUFFER else Arrival.MISSING for a in self._arrivals]
        self._came = 0

    def add(self, index: int, gradient: Tensor) -> bool:
        """Takes one parameter's gradient. The same parameter may come more than once: the gradients are added up.

        Returns whether the pass is ``complete``.
        """
        if self._arrivals[index] is Arrival.WAITING:
            self._deposit()
        arrival = self._arrivals[index]
        if arrival is Arrival.MISSING:
            self._waiting[index] = gradient
            self._waiting_bytes += gradient.nbytes
            self._arrivals[index] = Arrival.WAITING
        else:
            assert self._buffer is not None
            if self._buffer.dtype is not self._accumulate:
                self._use(self._buffer.to(self._accumulate))
            self._slots[index].add_(gradient)
            self._arrivals[index] = Arrival.DEPOSITED
        self._came += arrival is not Arrival.DEPOSITED
        complete = self._came == len(self._arrivals)
        if complete or self._waiting_bytes >= DEPOSIT_BYTES:
            self._deposit()
        return complete

    def drop(self, index: int) -> None:
        """Forgets one parameter's gradient, so that this backward pass is no longer complete."""
        self._deposit()
        self._came -= self._arrivals[index] is Arrival.DEPOSITED
        self._arrivals[index] = Arrival.MISSING

    def scale(self, factors: Factors) -> None:
        """Multiplies the gradients that came so far, each by its factors."""
        self._deposit()
        for index, arrival in enumerate(self._arrivals):
            if arrival in IN_BUFFER and factors.of(index):
                apply(factors.of(index), self._slots[index])

    def clear(self) -> None:
        """Forgets everything."""
        self._buffer, self._slots = None, []
        self._waiting, self._waiting_bytes = {}, 0
        self._arrivals, self._came = [Arrival.MISSING] * len(self._arrivals), 0

    def take(self) -> Tensor:
        """The whole flat to be reduced, with zeros where this rank has no gradient. Everything is forgotten then."""
        self._deposit()
        buffer = self._buffer
        if buffer is None:
            return self._new_buffer().zero_()
        if not self.complete:
            missing = (arrival is Arrival.MISSING for arrival in self._arrivals)
            compat.zero_all(list(compress(self._slots, missing)))
        self.clear()
        return buffer

    def _deposit(self) -> None:
        """Copies the waiting gradients into the buffer, many small ones with one kernel."""
        if not self._waiting:
            return
        if self._buffer is None:
            compat.zero_all(self._use(self._new_buffer()))
        compat.copy_all([self._slots[index] for index in self._waiting], list(self._waiting.values()))
        for index in self._waiting:
            self._arrivals[index] = Arrival.DEPOSITED
        self._waiting, self._waiting_bytes = {}, 0

    def _new_buffer(self) -> Tensor:
        return torch.empty(self._layout.numel, dtype=self._dtype, device=self._device)

    def _use(self, buffer: Tensor) -> list[Tensor]:
        """Makes this the buffer. Returns the padding between the parameters."""
        self._buffer = buffer
        self._slots, padding = self._layout.cut(buffer)
        return padding
