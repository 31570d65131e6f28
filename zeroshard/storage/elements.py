"""Looks at the elements of a checkpoint before they are loaded: training cannot go on from every number."""

from __future__ import annotations

import math
from typing import NamedTuple

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
        if not elements.is_floating_point() or not elements.numel():
            return None
        least, most = float(elements.amin()), float(elements.amax())  # both are NaN if any element is
        bounded = math.isfinite(most) or (self.not_negative and most == math.inf)  # such an element is not updated
        if self.finite and not (math.isfinite(least) and bounded):
            return (
                "NaN or infinite elements, from which training cannot go on; load an older checkpoint, or pass "
                "allow_nonfinite=True to load them as they are"
            )
        if self.not_negative and (least < 0 or (math.isnan(least) and bool((elements < 0).any()))):
            return "elements below 0, of which an update takes the square root"
        return None
