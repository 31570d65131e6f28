"""The stash: one flat's averaged gradient on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..config.layout import Piece
from ..shown.factors import Factors, Scaling, apply, apply_groups, multiplier
from ..system import compat


class Conversion(NamedTuple):
    """How an averaged gradient becomes the optimizer's. Gradients with equal conversions are converted in one call."""

    wide: torch.dtype
    """The dtype in which the gradient is multiplied."""
    scaling: Scaling
    dtype: torch.dtype


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
        values, conversion = self.values, self.conversion(dtype, wanted)
        if values is None:
            return None
        if conversion is not None:
            return _take_converted([self], conversion)[0]
        if values.dtype is not dtype:
            values = values.to(torch.promote_types(values.dtype, dtype), copy=True)
        apply_groups(self.factors.groups(wanted), values, self._pieces)
        self.factors.clear()
        return values.to(dtype)

    def conversion(self, dtype: torch.dtype, wanted: Sequence[bool]) -> Conversion | None:
        """How ``take`` changes the dtype and scales in one pass. None if one pass is not enough, or is not needed."""
        scaling = self.factors.common(wanted)
        if self.values is None or scaling is None or self.values.dtype is dtype:
            return None
        return Conversion(torch.promote_types(self.values.dtype, dtype), scaling, dtype)

    def clear(self) -> None:
        self.values, self.is_sum = None, False
        self.factors.clear()

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """The memory in use: for the gradient of one micro-batch, and for the sum of several."""
        values = [] if self.values is None else [self.values]
        return ([], values) if self.is_sum else (values, [])


class Request(NamedTuple):
    """Asks for the gradient of one flat: in this dtype, and right for the ``wanted`` parameters."""

    stash: Stash
    dtype: torch.dtype
    wanted: Sequence[bool]


def take_all(requests: Sequence[Request]) -> list[Tensor | None]:
    """``take`` of many flats. In one call if all need the same conversion, which is the usual case."""
    conversions = {stash.conversion(dtype, wanted) for stash, dtype, wanted in requests}
    if len(conversions) == 1 and (conversion := conversions.pop()) is not None:
        return [*_take_converted([request.stash for request in requests], conversion)]
    return [stash.take(dtype, wanted) for stash, dtype, wanted in requests]


def _take_converted(stashes: Sequence[Stash], conversion: Conversion) -> list[Tensor]:
    """``take`` of gradients that all have this conversion."""
    values = [stash.values for stash in stashes if stash.values is not None]
    factor = multiplier(conversion.scaling, values[0].device, conversion.wide)
    for stash in stashes:
        stash.factors.clear()
    if factor is not None:
        values = compat.products(values, factor.reshape(1))  # it has a dimension, so the result has its dtype
    return [each.to(conversion.dtype) for each in values]
