"""The stash: one flat's averaged gradient on the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..config.layout import Piece


class Stash:
    """An averaged gradient on the device, and a factor that is still to be applied to it.

    The gradient of one micro-batch is stored in the parameters' dtype. The sum of several is an *accumulator*, in the
    accumulation dtype.
    """

    def __init__(self, dtype: torch.dtype, accumulate: torch.dtype) -> None:
        self._dtype, self._accumulate = dtype, accumulate
        self.values: Tensor | None = None
        self.is_sum = False
        self.factor: Tensor | None = None

    def add(self, gradient: Tensor, *, is_sum: bool) -> None:
        """Adds one averaged gradient. ``is_sum``: a wider dtype than the parameters' means several micro-batches."""
        if self.values is None:
            self.is_sum = is_sum and gradient.dtype is not self._dtype
            self.values = gradient if self.is_sum else gradient.to(self._dtype)
            return
        if not self.is_sum:
            wide = torch.promote_types(self._dtype, self._accumulate)
            self.values, self.is_sum = self.values.to(wide), True
        self.values.add_(gradient)

    def scale(self, factor: Tensor) -> None:
        self.factor = factor if self.factor is None else self.factor * factor

    def apply_factor(self) -> Tensor | None:
        """Multiplies now. Returns the factor, which is then used up."""
        factor, self.factor = self.factor, None
        if factor is not None and self.values is not None:
            self.values.mul_(factor)
        return factor

    def take(self, dtype: torch.dtype) -> Tensor | None:
        """The gradient in the optimizer's dtype, scaled; None if there is no gradient."""
        values, factor = self.values, self.factor
        if values is None:
            return None
        self.factor = None
        if factor is None:
            return values.to(dtype)
        if values.dtype is dtype:
            return values.mul_(factor)
        wide = torch.promote_types(values.dtype, dtype)
        return (values * factor.to(wide).expand_as(values)).to(dtype)  # widened and scaled in one pass

    def zero(self, pieces: Iterable[Piece], slot: int) -> None:
        """Zeroes one parameter's gradient."""
        for piece in pieces:
            if piece.slot == slot and self.values is not None:
                self.values[piece.offset :][: piece.numel].zero_()

    def clear(self) -> None:
        self.values, self.is_sum, self.factor = None, False, None

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """The memory in use: for the gradient of one micro-batch, and for the sum of several."""
        values = [] if self.values is None else [self.values]
        return ([], values) if self.is_sum else (values, [])
