"""The device's home: master and averaged gradients in device memory, states with torch's own optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from ..config.table import Extent, Place
from ..system import compat
from .home import Home, StateTensors
from .stash import Request

if TYPE_CHECKING:
    from .flat import Flat


class DeviceHome(Home):
    """Where optimizer states and averaged gradients live on the device."""

    place = Place.DEVICE

    def __init__(self, flat: Flat) -> None:
        super().__init__(flat)
        precision = flat.precision
        self.separate_master = flat.trainable and flat.master_dtype is not flat.dtype
        self.fills_shard = precision.cast_on_gather and flat.sharded and self.separate_master
        self.shows_gradient = flat.table.optimizer.extent is Extent.WHOLE and precision.loss_scale is None
        self.takes_early = self.shows_gradient
        self._master: Tensor

    @property
    def stored(self) -> Tensor:
        return self._master

    def move_in(self, values: Tensor) -> None:
        if not self.separate_master:
            self._master = self.flat.own_parameters
        elif self.flat.own == self.flat.at_rest:
            self._master = values
        else:
            self._master = values.clone()  # a view would occupy the memory of all the values

    def adopt(self, values: Tensor) -> None:
        self._master.copy_(values)

    def before_gather(self, shard: Tensor) -> None:
        if self.fills_shard:
            shard.copy_(self._master)

    def publish(self) -> None:
        round_masters([self])

    def take(self, gradient: Tensor, *, complete: bool) -> None:
        self._stash.add(gradient, is_sum=self.flat.alone)

    def request(self) -> Request:
        """Asks for the averaged gradient, for the optimizer, in the master's dtype."""
        return Request(self._stash, self.flat.master_dtype, self.flat.gradient.there)

    def resting_on_device(self) -> list[Tensor]:
        return [self._master, *self.flat.pieces.values()]

    def on_device(self) -> StateTensors:
        return StateTensors(*self._stash.tensors(), [self._master] if self.separate_master else [])


def round_masters(homes: Iterable[DeviceHome]) -> None:
    """Brings the masters' values to the parameters at rest. On CUDA one kernel serves many flats."""
    separate = [home for home in homes if home.separate_master and not home.fills_shard]
    if separate:
        compat.copy_all([home.flat.own_parameters for home in separate], [home.stored for home in separate])
