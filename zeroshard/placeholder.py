"""What stands where a value is not current: a NaN scalar expanded to the right shape.

A freed storage behind a live tensor crashes the process when it is read, and an old value misleads silently. A
placeholder does neither: shape and dtype are right, reading gives NaN, in-place arithmetic raises. Two ways to write
are not refused by torch, ``fill_`` and its kin and anything through ``.data``; ``intact`` finds them out later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Placeholders:
    """The placeholders of one model: one NaN scalar a dtype, on the model's device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scalars: dict[torch.dtype, Tensor] = {}

    def parameter(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """For a parameter's data. Shares one scalar, so that a thousand released parameters cost four bytes."""
        if dtype not in self._scalars:
            self._scalars[dtype] = torch.full((), math.nan, dtype=dtype, device=self._device)
        return self._scalars[dtype].expand(tuple(shape))

    def gradients(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
        """For ``grad`` of some parameters. ``.data`` gives each a version of its own, which tells if it was zeroed."""
        scalar = torch.full((), math.nan, dtype=dtype, device=self._device)
        return [scalar.expand(tuple(shape)).data for shape in shapes]

    def intact(self) -> bool:
        """Whether nobody wrote to a released parameter. Waits for the device; repairs what it finds."""
        good = True
        for scalar in self._scalars.values():
            if not math.isnan(float(scalar)):
                scalar.fill_(math.nan)
                good = False
        return good
