"""Factors: numbers that an averaged gradient is still to be multiplied or divided by.

A user's ``mul_``, torch's clipping, our own clipping and the loss scale only note a factor. The update applies it in
its own pass over the gradient, so that none of them costs a pass, a wait or a collective.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from itertools import repeat
from operator import is_

import torch
from torch import Tensor

from ..config.layout import Piece
from ..system import compat


class Factor:
    """A number, or a tensor with one element, that a gradient is multiplied by, or divided by.

    Two factors are equal if they have the same number, or the same tensor object: equal factors are applied together.
    """

    def __init__(self, value: Tensor | float, *, divides: bool = False, copy: bool = True) -> None:
        """``copy`` is False for a tensor that nobody writes to."""
        self.value = (_snapshot(value) if copy else value) if isinstance(value, Tensor) else float(value)
        self.divides = divides
        self.key = (id(self.value) if isinstance(self.value, Tensor) else self.value, divides)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Factor) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


_last: tuple[weakref.ref[Tensor], int, Tensor] | None = None


def _snapshot(value: Tensor) -> Tensor:
    """A copy of a factor, because users may change theirs. One copy for a row of calls with the same tensor."""
    global _last
    if _last is not None and _last[0]() is value and _last[1] == compat.version(value):
        return _last[2]
    copied = value.detach().reshape(()).clone()
    _last = (weakref.ref(value), compat.version(value), copied)
    return copied


Scaling = tuple[Factor, ...]
"""The factors of one gradient, in the order in which they were asked for."""


def multiplier(scaling: Scaling, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """The product of all factors, a tensor on the device; None for 1. A single tensor is returned as it is."""
    number, product = 1.0, None
    for factor in scaling:
        if isinstance(factor.value, Tensor):
            value = factor.value.to(device, dtype)
            value = value.reciprocal() if factor.divides else value
            product = value if product is None else product * value
        else:
            number *= _reciprocal(factor.value) if factor.divides else factor.value
    if product is None:
        return None if number == 1.0 else torch.full((), number, dtype=dtype, device=device)
    return product if number == 1.0 else product * number


def _reciprocal(value: float) -> float:
    return 1.0 / value if value else math.copysign(math.inf, value)


def apply(scaling: Scaling, values: Tensor) -> None:
    """Multiplies in place. One factor alone gives the bits of ``mul_`` or ``div_`` itself."""
    if len(scaling) == 1:
        (factor,) = scaling
        value = factor.value.to(values.device) if isinstance(factor.value, Tensor) else factor.value
        values.div_(value) if factor.divides else values.mul_(value)
        return
    wide = torch.promote_types(values.dtype, torch.float32)
    product = multiplier(scaling, values.device, wide)
    if product is not None:
        values.mul_(product)


Groups = dict[Scaling, list[int]]
"""Indices of parameters by their factors."""


def apply_groups(groups: Groups, values: Tensor, pieces: Sequence[Piece]) -> None:
    """Multiplies the gradients of a flat in place, each by its factors. One group alone is taken for all."""
    if len(groups) == 1:
        apply(next(iter(groups)), values)
        return
    of_slot = {slot: scaling for scaling, slots in groups.items() for slot in slots if scaling}
    for piece in pieces:
        if piece.slot in of_slot:
            apply(of_slot[piece.slot], values[piece.offset :][: piece.numel])


class Factors:
    """The factors of the gradients of one flat, by parameter."""

    def __init__(self, count: int) -> None:
        self._scalings: list[Scaling] = [()] * count
        self._any = False

    def __bool__(self) -> bool:
        return self._any

    def add(self, factor: Factor, slot: int | None = None) -> None:
        """Notes a factor of one parameter's gradient, or of all."""
        if slot is not None:
            self._scalings[slot] = (*self._scalings[slot], factor)
            self._any = True
            return
        if not self._any:
            self._scalings, self._any = [(factor,)] * len(self._scalings), True
            return
        made: dict[Scaling, Scaling] = {}
        for index, scaling in enumerate(self._scalings):
            if scaling not in made:
                made[scaling] = (*scaling, factor)
            self._scalings[index] = made[scaling]

    def of(self, slot: int) -> Scaling:
        return self._scalings[slot]

    def take(self, slot: int) -> Scaling:
        """One parameter's factors, which are then used up."""
        found, self._scalings[slot] = self._scalings[slot], ()
        return found

    def common(self, wanted: Sequence[bool]) -> Scaling | None:
        """The factors that all wanted parameters have. None if they do not have the same."""
        first = self._scalings[0]
        if all(map(is_, self._scalings, repeat(first))):  # one object for all, mostly
            return first
        groups = self.groups(wanted) or {(): []}
        return next(iter(groups)) if len(groups) == 1 else None

    def groups(self, wanted: Sequence[bool]) -> Groups:
        """The wanted parameters by their factors. Mostly one group."""
        if not self._any:
            return {(): [slot for slot, chosen in enumerate(wanted) if chosen]}
        found: Groups = {}
        last, members = None, []
        for slot, scaling in enumerate(self._scalings):
            if wanted[slot]:
                if scaling is not last:  # one object for all, mostly: a look into the dictionary would compare factors
                    last, members = scaling, found.setdefault(scaling, [])
                members.append(slot)
        return found

    def clear(self) -> None:
        if self._any:
            self._scalings, self._any = [()] * len(self._scalings), False
