"""The treatment of averaged gradients before the update: look for NaN and inf, unscale, clip."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..comm.fabric import Fabric
from ..shown.factors import Factor
from ..states.flat import Flat
from ..system import compat
from .loss_scale import LossScaler
from .nonfinite import Faults
from .norm import check_equal_gradients, clip_factor, global_norm


class Treatment:
    """Norm, clipping, loss scale and the search for NaN and inf, for one model."""

    def __init__(
        self, flats: list[Flat], fabric: Fabric, max_norm: float | None, scaler: LossScaler | None, faults: Faults
    ) -> None:
        self._flats, self._fabric, self._max_norm = flats, fabric, max_norm
        self.scaler, self.faults = scaler, faults
        self._norm_known = False
        """Whether the norm of the present gradients is known, from before they were clipped."""
        self.grad_norm: Tensor | None = None
        """Global gradient norm before clipping, of the last step that computed it; on the device."""
        self.check_equal = True
        """Whether the coming step compares gradients of parameters that every tensor-parallel rank has whole."""

    def begin(self) -> None:
        """Called once for every new set of averaged gradients."""
        self._norm_known = False

    def check(self) -> None:
        """Compares gradients that must be equal among ranks, where ``check_equal`` asks for that."""
        if self.check_equal:
            check_equal_gradients(self._flats, self._fabric)
            self.check_equal = False

    def apply(self, step: int, order: list[Flat]) -> bool:
        """Clips and unscales. Returns False if the step is to be left out.

        Waits for the device only with loss scaling or ``on_nonfinite``.
        """
        if self._max_norm is None and self.scaler is None and not self.faults.watching:
            return True
        norm = self._norm()
        if self.faults.watching:
            curable = self.scaler is not None and self.scaler.can_be_lowered
            if self.faults.found(step, norm, order, curable):
                return False
        factor: Tensor | None = None
        if self.scaler is not None:
            scale = self.scaler.scale
            overflowed = not compat.is_fake(norm) and not math.isfinite(float(norm))
            self.scaler.update(overflowed)
            if overflowed:
                return False
            factor = torch.tensor(1.0 / scale, dtype=torch.float32, device=self._fabric.device)
        if self._max_norm is not None:
            clipping = clip_factor(norm, self._max_norm)
            factor = clipping if factor is None else factor * clipping
        if factor is not None:
            self._scale(factor)
        return True

    def clip(self, max_norm: float) -> Tensor:
        """Scales gradients to a global norm of at most ``max_norm``; returns the norm before."""
        norm = self._norm()
        self._scale(clip_factor(norm, max_norm))
        return norm

    def _norm(self) -> Tensor:
        with compat.label("zeroshard.norm"):
            norm = global_norm(self._flats, self._fabric)
            if self.scaler is not None:
                norm = norm / self.scaler.scale
            self.note_norm(norm)
            return norm

    def note_norm(self, norm: Tensor) -> None:
        """Notes the norm of all averaged gradients. The first one counts: later ones may be of clipped gradients."""
        if not self._norm_known:
            self.grad_norm, self._norm_known = norm, True

    def _scale(self, value: Tensor) -> None:
        factor = Factor(value, copy=False)
        for flat in self._flats:
            flat.home.scale(factor)
