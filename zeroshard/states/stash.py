"""The stash: one flat's averaged gradient on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config.layout import Piece
from ..shown.factors import Factors, apply, apply_groups, multiplier


class Stash:
    """An averaged gradient on the device, and the factors that are still to be applied to it.

    The gradient of one micro-batch is stored in the parameters' dtype. The sum of several is an *accumulator*, in the
    accumulation dtype.
    """

    def __init__(self, dtype: torch.dtype, accumulate: torch.dtype, pieces: Sequence[Piece], count: int) -> None:
        """``pieces`` are the parts of the flat's parameters in the gradient; ``count`` parameters are in the flat."""
        self._dtype, self._accumulate, self._pieces = dtype, accumulate, pieces
        self.values: Tensor | None = None
        self.is_sum = False
        self.factors = Factors(count)

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

    def part(self, slot: int) -> Tensor | None:
        """One parameter's part of the gradient; None if this rank has no part of it."""
        for piece in self._pieces:
            if piece.slot == slot and self.values is not None:
                return self.values[piece.offset :][: piece.numel]
        return None

    def apply_factors(self, wanted: Sequence[bool]) -> None:
        """Multiplies now, so that no factor is left. Only gradients of ``wanted`` parameters must be right after it."""
        if self.factors and self.values is not None:
            apply_groups(self.factors.groups(wanted), self.values, self._pieces)
        self.factors.clear()

    def apply_factor(self, slot: int) -> None:
        """Multiplies one parameter's gradient now."""
        scaling, part = self.factors.take(slot), self.part(slot)
        if scaling and part is not None:
            apply(scaling, part)

    def take(self, dtype: torch.dtype, wanted: Sequence[bool]) -> Tensor | None:
        """The gradient in the optimizer's dtype, scaled; None if there is no gradient."""
        values = self.values
        if values is None:
            return None
        groups = self.factors.groups(wanted)
        self.factors.clear()
        if values.dtype is dtype:
            apply_groups(groups, values, self._pieces)
            return values
        wide = torch.promote_types(values.dtype, dtype)
        if len(groups) == 1:  # widened and scaled in one pass
            factor = multiplier(next(iter(groups)), values.device, wide)
            return values.to(dtype) if factor is None else (values * factor.expand_as(values)).to(dtype)
        widened = values.to(wide, copy=True)
        apply_groups(groups, widened, self._pieces)
        return widened.to(dtype)

    def clear(self) -> None:
        self.values, self.is_sum = None, False
        self.factors.clear()

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """The memory in use: for the gradient of one micro-batch, and for the sum of several."""
        values = [] if self.values is None else [self.values]
        return ([], values) if self.is_sum else (values, [])
