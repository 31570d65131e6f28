"""Looks at the elements of a checkpoint before they are loaded: training cannot go on from every number."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .format import BUFFER


class Demand(NamedTuple):
    """What the elements of a range must be."""

    finite: bool
    """No element is NaN or infinite."""
    not_negative: bool
    """No element is below 0, as in an average of squares, of which the update takes the square root."""

    @classmethod
    def of(cls, kind: str, *, not_negative: bool, allow_nonfinite: bool) -> Demand:
        """The demand on a range of this kind. A buffer may have any elements: a mask has infinite ones."""
        return cls(finite=kind != BUFFER and not allow_nonfinite, not_negative=not_negative)

    def flaw_of(self, elements: Tensor) -> str | None:
        """Says what is wrong with elements; None if nothing is."""
        if not elements.is_floating_point():
            return None
        if self.finite and not _are_finite(elements):
            return (
                "NaN or infinite elements, from which training cannot go on; load an older checkpoint, or pass "
                "allow_nonfinite=True to load them as they are"
            )
        if self.not_negative and bool((elements < 0).any()):
            return "elements below 0, of which an update takes the square root"
        return None


def _are_finite(elements: Tensor) -> bool:
    """True if no element is NaN or infinite. A norm is the fastest sum; it can also be infinite for large elements."""
    wide = torch.float32 if elements.dtype.itemsize < 4 else elements.dtype
    norm = torch.linalg.vector_norm(elements, dtype=wide)
    return bool(torch.isfinite(norm)) or bool(torch.isfinite(elements).all())
