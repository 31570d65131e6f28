"""The home of a flat: where its optimizer states and averaged gradients live.

There are two kinds: the device's (``device_home.py``) and the host's (``offload/home.py``). A flat gets its home when
the model is sharded. From then on everybody asks the home, and nobody asks where it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ..config.table import Place

if TYPE_CHECKING:
    from .flat import Flat


class Publication(Protocol):
    """New parameters on their way to where parameters rest."""

    @property
    def sent(self) -> bool:
        """Whether ``wait`` would not hold up the host."""

    def wait(self) -> None:
        """Waits until the parameters are sent. Later work on the current stream sees them."""


class StateTensors(NamedTuple):
    """Tensors that a home holds on the device, for the memory ledger."""

    gradients: list[Tensor]
    accumulators: list[Tensor]
    masters: list[Tensor]


class Home(ABC):
    """Where one flat's optimizer states and averaged gradients live."""

    place: Place
    held = False
    """A delayed update is made that nobody has published."""
    asynchronous = False
    """Whether updates go on after ``step()`` has returned."""
    separate_master: bool
    """Whether the master is a copy of its own, rather than the parameters themselves."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self._before_write: Tensor | None = None

    # -- values at rest -------------------------------------------------------------------------------------------

    @property
    def resting(self) -> Tensor | None:
        """The parameters at rest, where they live in this home. None where the flat has them."""
        return None

    @property
    @abstractmethod
    def fills_shard(self) -> bool:
        """Whether the flat's shard has no memory of its own at rest, and ``before_gather`` fills it."""

    @property
    @abstractmethod
    def stored(self) -> Tensor:
        """The memory that the optimizer's pieces are cut from."""

    @abstractmethod
    def master(self) -> Tensor:
        """The values that the optimizer updates, where they are."""

    @abstractmethod
    def rounded(self, values: Tensor) -> Tensor:
        """Values in the parameters' dtype, rounded as ``publish`` rounds them."""

    @abstractmethod
    def move_in(self, values: Tensor) -> None:
        """Takes the first values of the range that this rank updates."""

    @abstractmethod
    def adopt(self, values: Tensor) -> None:
        """Takes other values as the master's."""

    @abstractmethod
    def before_gather(self, shard: Tensor) -> None:
        """Fills a shard that has no memory of its own at rest."""

    @abstractmethod
    def publish(self) -> Publication | None:
        """Brings the master's values to where parameters rest. Returns what to wait for; None if they are there."""

    @abstractmethod
    def before_write(self) -> None:
        """Called before a user writes to the parameters."""

    def after_write(self) -> None:
        """Called when no user writes any more."""
        self._before_write = None

    def follow(self, values: Tensor) -> None:
        """Makes the master follow parameters that a user wrote. Unchanged values keep the master's lower bits."""
        if self.separate_master:
            master = (self.master() if self._before_write is None else self._before_write).to(values.device)
            self.adopt(torch.where(self.rounded(master) == values, master, values.to(master.dtype)))

    # -- for checkpoints ------------------------------------------------------------------------------------------

    joins_master = False
    """Whether ``master()`` puts the values together anew, in memory of its own."""

    def loading(self) -> Tensor:
        """Memory to read the master's values into, before ``adopt`` takes them."""
        return self.stored

    def shown(self) -> Tensor:
        """The parameters of this rank's range at rest: while an update is held, those from before it."""
        return self.flat.own_parameters

    def hold(self, values: Tensor) -> None:
        """Takes values as what a delayed update has made of the master, and shows nothing of it yet."""
        raise AssertionError("nothing is held back here")

    # -- averaged gradients ---------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def factor(self) -> Tensor | None:
        """What the averaged gradient is still to be multiplied by."""

    @property
    @abstractmethod
    def has_gradient(self) -> bool:
        """Whether an averaged gradient came since the last step."""

    @property
    def averaged(self) -> Tensor | None:
        """The averaged gradient of this rank's range, if it is on the device."""
        return None

    @property
    @abstractmethod
    def takes_early(self) -> bool:
        """Whether gradients come home when backward ends. Elsewhere they may stay under way until the step."""

    @property
    def shows_gradient(self) -> bool:
        """Whether users may see, change and assign the averaged gradient."""
        return False

    def visible(self) -> Tensor | None:
        """The averaged gradient for users to see, where ``shows_gradient``."""
        return None

    def assign(self, slot: int, gradient: Tensor) -> None:
        """Takes a user's gradient in the place of the averaged one, where ``shows_gradient``."""
        raise AssertionError("users see no gradient here")

    @abstractmethod
    def begin_backward(self) -> None:
        """A new backward pass: a factor asked for so far is not for its gradients. Raises if no more may come."""

    @abstractmethod
    def take(self, gradient: Tensor, *, complete: bool) -> None:
        """Takes one averaged gradient; of several micro-batches the sum counts.

        ``complete`` tells whether every parameter of the flat had its gradient.
        """

    @abstractmethod
    def scale(self, factor: Tensor) -> None:
        """Multiplies the averaged gradient when it is next touched, so that clipping needs no pass of its own."""

    @abstractmethod
    def counted(self) -> Tensor | None:
        """The part of the gradient that counts for the norm on this rank, if it is on the device."""

    def norm(self) -> Tensor | None:
        """The 2-norm of that part, if it is elsewhere."""
        return None

    @abstractmethod
    def discard(self, slot: int) -> None:
        """Drops one parameter's gradient."""

    @abstractmethod
    def forget(self) -> None:
        """Drops the whole gradient."""

    # -- other ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def check_not_updated(self) -> None:
        """Raises if this step's update is made already."""

    @abstractmethod
    def on_device(self) -> StateTensors:
        """What the home holds on the device now."""

    def on_host(self) -> dict[str, int]:
        """Bytes that the home holds on the host, by kind of state (fields of ``Memory``)."""
        return {}
