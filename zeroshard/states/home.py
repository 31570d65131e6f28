"""The home of a flat: where its optimizer states and averaged gradients live.

There are two kinds: the device's (``device_home.py``) and the host's (``offload/home.py``). A flat gets its home when
the model is sharded. From then on everybody asks the home, and nobody asks where it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ..comm import parallel
from ..config.table import Place
from ..shown.factors import Factor, Factors, apply_groups, multiplier
from ..shown.sharded_gradient import Change, Cut
from .stash import Stash

if TYPE_CHECKING:
    from .flat import Flat


class Publication(Protocol):
    """New parameters on their way to where parameters rest."""

    @property
    def sent(self) -> bool:
        """Whether ``wait`` returns without waiting on the host."""

    def wait(self) -> None:
        """Waits until the parameters are sent. Later work on the current stream sees them."""


class StateTensors(NamedTuple):
    """Tensors that a home has on the device, for the memory ledger."""

    gradients: list[Tensor]
    accumulators: list[Tensor]
    masters: list[Tensor]


class Home(ABC):
    """Where one flat's optimizer states and averaged gradients live."""

    place: Place
    asynchronous = False
    """Whether updates go on after ``step()`` has returned."""
    separate_master: bool
    """Whether the master is a copy of its own. Else the master is the parameters themselves."""
    joins_master = False
    """Whether ``master()`` puts the values together in new memory at every call."""
    fills_shard: bool
    """Whether the flat's shard has no memory of its own at rest, so that ``before_gather`` fills it."""
    takes_early: bool
    """Whether gradients come home when backward ends. Elsewhere they may stay under way until the step."""
    shows_gradient = False
    """Whether users may see, change and assign the averaged gradient."""
    delays = False
    """Whether updates may be held back."""
    held = False
    """A delayed update is made that nobody has published."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        pieces = flat.layout.pieces(flat.own)
        self._stash = Stash(flat.dtype, flat.precision.accumulate, pieces, len(flat.parameters))
        """The part of the averaged gradient that is on the device, and the factors of the whole gradient."""
        self._before_write: Tensor | None = None
        """The master from before a user's write, where the write changes the master too."""

    # -- values at rest -------------------------------------------------------------------------------------------

    @property
    def resting(self) -> Tensor | None:
        """The parameters at rest, if they live in this home. None if the flat has them."""
        return None

    @property
    @abstractmethod
    def stored(self) -> Tensor:
        """The memory that the optimizer's pieces are cut from."""

    def master(self) -> Tensor:
        """The values that the optimizer updates, where they are."""
        return self.stored

    def rounded(self, values: Tensor) -> Tensor:
        """Values in the parameters' dtype, rounded as ``publish`` rounds them."""
        return values.to(self.flat.dtype)

    @abstractmethod
    def move_in(self, values: Tensor) -> None:
        """Takes the first values of the range that this rank updates."""

    @abstractmethod
    def adopt(self, values: Tensor) -> None:
        """Takes other values as the master's."""

    @abstractmethod
    def before_gather(self, shard: Tensor) -> None:
        """Fills the shard, if ``fills_shard``."""

    @abstractmethod
    def publish(self) -> Publication | None:
        """Brings the master's values to where parameters rest. Returns a publication, unless the values are there."""

    def before_write(self) -> None:
        """Called before a user writes to the parameters."""
        return

    def after_write(self) -> None:
        """Called when no user writes any more."""
        self._before_write = None

    def follow(self, values: Tensor) -> None:
        """Makes the master follow parameters that a user wrote. Where a value is unchanged, the master is too."""
        if self.separate_master:
            master = (self.master() if self._before_write is None else self._before_write).to(values.device)
            self.adopt(torch.where(self.rounded(master) == values, master, values.to(master.dtype)))

    # -- for checkpoints ------------------------------------------------------------------------------------------

    def loading(self) -> Tensor:
        """Memory to read the master's values into, before ``adopt`` takes them."""
        return self.stored

    def shown(self) -> Tensor:
        """The parameters of this rank's range at rest. While an update is held, they are from before the update."""
        return self.flat.own_parameters

    def hold(self, values: Tensor) -> None:
        """Takes values as a delayed update that is made and not published. Only where ``delays``."""
        raise AssertionError("nothing is held back here")

    # -- averaged gradients ---------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """A new backward pass, whose gradients do not get an earlier factor. Raises if no more gradients may come."""
        self._stash.apply_factors(self.flat.gradient.there)

    @abstractmethod
    def take(self, gradient: Tensor, *, complete: bool) -> None:
        """Takes one averaged gradient. The gradients of several micro-batches are added up.

        ``complete`` tells whether every parameter of the flat had its gradient.
        """

    def visible(self) -> Tensor | None:
        """The averaged gradient for users: whole, multiplied by its factor, in the parameters' dtype. Else None."""
        values = self._stash.values
        if not self.shows_gradient or values is None or values.dtype is not self.flat.dtype:
            return None
        self._stash.apply_factors(self.flat.gradient.there)
        return values

    def assign(self, slot: int, gradient: Tensor, scale: float) -> None:
        """Replaces the averaged gradient of one parameter by a user's, which has the slot's shape."""
        self._make_room(gradient.device)

        def copy(part: Tensor, cut: Cut) -> None:
            part.copy_(cut(gradient))

        self.change(slot, copy, scale)

    def _make_room(self, device: torch.device) -> None:
        """Makes a gradient of zeros, if there is no gradient."""
        if self._stash.values is None:
            self._stash.values = torch.zeros(self.flat.own.numel, dtype=self.flat.dtype, device=device)

    def change(self, slot: int, change: Change, scale: float) -> None:
        """Changes this rank's part of one parameter's gradient, which is multiplied by the loss ``scale``."""
        self._stash.apply_factor(slot)
        part = self._stash.part(slot)
        if part is not None:
            self._change_part(slot, part, change, scale)

    def _change_part(self, slot: int, part: Tensor, change: Change, scale: float) -> None:
        piece = next(piece for piece in self.flat.layout.pieces(self.flat.own) if piece.slot == slot)
        place = self.flat.layout.slots[slot]

        def cut(tensor: Tensor) -> Tensor:
            local = parallel.local(tensor)
            mine = local if local.shape == place.shape else place.part(local)
            return mine.reshape(-1)[piece.start : piece.stop]

        if scale == 1.0:
            change(part, cut)
            return
        unscaled = part.to(torch.promote_types(part.dtype, torch.float32)) / scale
        change(unscaled, cut)
        part.copy_(unscaled * scale)

    @property
    def factors(self) -> Factors:
        """The factors that the averaged gradient is still to be multiplied by, by parameter."""
        return self._stash.factors

    def factor(self) -> Tensor | None:
        """The number that all gradients of the flat are still to be multiplied by; None for 1."""
        scaling = self.factors.common(self.flat.gradient.there)
        assert scaling is not None, "unify_factors() comes before"
        return multiplier(scaling, self.flat.gradient.device)

    def unify_factors(self) -> None:
        """Makes sure that the gradients of all parameters have the same factors still to be applied."""
        if self.factors.common(self.flat.gradient.there) is None:
            self._stash.apply_factors(self.flat.gradient.there)

    def scale(self, factor: Factor) -> None:
        """Multiplies the averaged gradient when it is next touched, so that clipping needs no pass of its own."""
        self._stash.factors.add(factor)

    def scale_one(self, slot: int, factor: Factor) -> None:
        """Multiplies one parameter's gradient when it is next touched."""
        self._stash.factors.add(factor, slot)

    def check_readable(self) -> None:
        """Raises if no averaged gradient is there for users to read or change."""
        return

    def counted(self) -> Tensor | None:
        """The part of the gradient that counts for the norm on this rank, if the gradient is on the device."""
        return None if self._stash.values is None else self._counted_of(self._stash.values)

    def _counted_of(self, own: Tensor) -> Tensor:
        return own if own.numel() == self.flat.shard_range.numel else own[self.flat.counted]

    def own_gradient(self) -> Tensor | None:
        """The averaged gradient of the range that this rank updates, where it is, without its factors. May wait."""
        return self._stash.values

    def parts(self) -> dict[int, Tensor]:
        """The parts of the gradient that count on this rank, by parameter, without their factors. May wait."""
        values = self.own_gradient()
        if values is None:
            return {}
        counted, pieces = self._counted_of(values), self.flat.layout.pieces(self.flat.shard_range)
        return {piece.slot: counted[piece.offset :][: piece.numel] for piece in pieces}

    def expect_norms(self) -> None:
        """Called when somebody asks for the norm of each gradient. The next step may ask again."""
        return

    def known_norms(self) -> dict[int, Tensor] | None:
        """The 2-norms of ``parts``, if they were computed when the gradient came. Nobody waits for them."""
        return None

    def averaged(self, scale: float) -> Tensor | None:
        """A copy of this rank's averaged gradient, as users see it: with its factors, without the loss scale."""
        values = self.own_gradient()
        if values is None:
            return None
        copied = values.to(torch.promote_types(values.dtype, torch.float32), copy=True)
        apply_groups(self.factors.groups(self.flat.gradient.there), copied, self.flat.layout.pieces(self.flat.own))
        return (copied if scale == 1.0 else copied / scale).to(self.flat.dtype)

    def norm(self) -> Tensor | None:
        """The 2-norm of the part that counts on this rank, if the gradient is not on the device."""
        return None

    def discard(self, slot: int) -> None:
        """Makes one parameter's gradient zero."""
        self._stash.factors.take(slot)
        part = self._stash.part(slot)
        if part is not None:
            part.zero_()

    def forget(self) -> None:
        """Drops the whole gradient."""
        self._stash.clear()

    def check_not_updated(self) -> None:
        """Raises if this step's update is made already."""
        return

    # -- asleep (``sleep.py``) ------------------------------------------------------------------------------------

    @abstractmethod
    def resting_on_device(self) -> list[Tensor]:
        """Tensors in device memory that are there between two steps, besides the flat's own."""

    def woke(self) -> None:
        """Called when these tensors have other device memory than before."""
        return

    # -- for the memory ledger ------------------------------------------------------------------------------------

    @abstractmethod
    def on_device(self) -> StateTensors:
        """What the home has on the device now."""

    def on_host(self) -> dict[str, int]:
        """Bytes that the home has on the host, by kind of state (fields of ``Memory``)."""
        return {}
