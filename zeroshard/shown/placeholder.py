"""Placeholders: a parameter or gradient whose value is not there points at NaN, one scalar expanded to its shape.

Reading a tensor whose storage is freed crashes the process, and an old value misleads silently. A placeholder does
neither. It is the last resort: users do not see it, because the classes of absent parameters (``absent.py``) and of
sharded gradients answer before torch reads any memory.
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
        """For a parameter or a gradient. All share one scalar, so that a thousand of them cost four bytes."""
        if dtype not in self._scalars:
            self._scalars[dtype] = torch.full((), math.nan, dtype=dtype, device=self._device)
        return self._scalars[dtype].expand(tuple(shape))
