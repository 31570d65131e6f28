"""The device's home: master and averaged gradients in device memory, states with torch's own optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config.layout import Piece
from ..config.table import Extent, Place
from .home import Home, StateTensors

if TYPE_CHECKING:
    from .flat import Flat


class Stash:
    """An averaged gradient on the device, and a factor still to be applied to it.

    One micro-batch is stored in the parameters' dtype. The sum of several is an *accumulator*, in the accumulation
    dtype.
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
        """Multiplies now; returns the factor, which is then used up."""
        factor, self.factor = self.factor, None
        if factor is not None and self.values is not None:
            self.values.mul_(factor)
        return factor

    def take(self, dtype: torch.dtype) -> Tensor | None:
        """The gradient in the optimizer's dtype, scaled; None if there is none."""
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


class DeviceHome(Home):
    """Where optimizer states and averaged gradients live on the device."""

    place = Place.DEVICE

    def __init__(self, flat: Flat) -> None:
        super().__init__(flat)
        precision = flat.precision
        self.separate_master = flat.trainable and flat.master_dtype is not flat.dtype
        self.casts_on_gather = precision.cast_on_gather and flat.sharded and self.separate_master
        """The shard has no memory of its own: every gather casts it from the master."""
        self._visible = flat.table.optimizer.extent is Extent.WHOLE and precision.loss_scale is None
        self._stash = Stash(flat.dtype, precision.accumulate)
        self._master: Tensor

    # -- values at rest -------------------------------------------------------------------------------------------

    @property
    def fills_shard(self) -> bool:
        return self.casts_on_gather

    @property
    def stored(self) -> Tensor:
        return self._master

    def master(self) -> Tensor:
        return self._master

    def rounded(self, values: Tensor) -> Tensor:
        return values.to(self.flat.dtype)

    def move_in(self, values: Tensor) -> None:
        if not self.separate_master:
            self._master = self.flat.own_parameters
        elif self.flat.own == self.flat.at_rest:
            self._master = values
        else:
            self._master = values.clone()  # a view would hold the memory of all the values

    def adopt(self, values: Tensor) -> None:
        self._master.copy_(values)

    def before_gather(self, shard: Tensor) -> None:
        if self.casts_on_gather:
            shard.copy_(self._master)

    def publish(self) -> None:
        if self.separate_master and not self.casts_on_gather:
            self.flat.own_parameters.copy_(self._master)

    def before_write(self) -> None:
        pass

    # -- averaged gradients ---------------------------------------------------------------------------------------

    @property
    def factor(self) -> Tensor | None:
        return self._stash.factor

    @property
    def has_gradient(self) -> bool:
        return self._stash.values is not None

    @property
    def averaged(self) -> Tensor | None:
        return self._stash.values

    @property
    def takes_early(self) -> bool:
        return self._visible

    @property
    def shows_gradient(self) -> bool:
        return self._visible

    def begin_backward(self) -> None:
        self._stash.apply_factor()

    def take(self, gradient: Tensor, *, complete: bool) -> None:
        self._stash.add(gradient, is_sum=self.flat.alone)

    def visible(self) -> Tensor | None:
        """The averaged gradient as users may see it: whole, scaled, in the parameters' dtype; None if there is none."""
        values = self._stash.values
        if not self._visible or values is None or values.dtype is not self.flat.dtype:
            return None
        self._stash.apply_factor()
        return values

    def assign(self, slot: int, gradient: Tensor) -> None:
        """Takes a user's gradient in the place of the averaged one."""
        flat = self.flat
        self._stash.apply_factor()  # the factor is not for the user's gradient
        if self._stash.values is None:
            self._stash.values = torch.zeros(flat.layout.numel, dtype=flat.dtype, device=gradient.device)
        flat.layout.slots[slot].view(self._stash.values).copy_(gradient)

    def scale(self, factor: Tensor) -> None:
        self._stash.scale(factor)

    def counted(self) -> Tensor | None:
        return None if self._stash.values is None else self._stash.values[self.flat.counted]

    def take_gradient(self) -> Tensor | None:
        """The averaged gradient for the optimizer, in the master's dtype; None if there is none."""
        return self._stash.take(self.flat.master_dtype)

    def discard(self, slot: int) -> None:
        self._stash.zero(self.flat.layout.pieces(self.flat.own), slot)

    def forget(self) -> None:
        self._stash.clear()

    # -- other ----------------------------------------------------------------------------------------------------

    def check_not_updated(self) -> None:
        pass

    def on_device(self) -> StateTensors:
        return StateTensors(*self._stash.tensors(), [self._master] if self.separate_master else [])
