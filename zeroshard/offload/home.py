"""The host's home: one flat's optimizer states and averaged gradients in host memory.

Everything here runs on the training thread or on autograd's thread. ``transfer.py`` does the copies and the updates.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config.layout import Piece, Slot
from ..config.table import Place
from ..shown.factors import multiplier
from ..shown.sharded_gradient import Change, Cut
from ..states.flat import Flat
from ..states.home import Home, StateTensors
from ..states.updates import FlatStates
from ..system import compat, trace
from .host_buffers import HostBuffers, join, round_to
from .pipeline import Pipeline, SentParameters
from .transfer import HostGradient, Transfer
from .update import Update

if TYPE_CHECKING:
    from .step import HostStep

STATE_KINDS = {"slot": "gradients", "total": "accumulators", "resting": "parameters", "fresh": "parameters"}
"""The kind of state that a buffer is, for the memory ledger. All other buffers are optimizer states."""


class HostHome(Home, FlatStates):
    """The home on the host of one flat."""

    place = Place.HOST
    asynchronous = True
    takes_early = True

    def __init__(self, flat: Flat, pipeline: Pipeline, step: HostStep, buffers: HostBuffers) -> None:
        super().__init__(flat)
        self.buffers, self.label, self._step, self._pipeline = buffers, flat.label, step, pipeline
        self.separate_master = flat.trainable
        self.joins_master, self.fills_shard = buffers.split, buffers.rests_here
        self.delays = pipeline.options.delayed_update_after is not None
        pipeline.buffers.append(buffers)
        pieces = flat.layout.pieces(flat.own) if flat.trainable else ()
        keys = {piece: _rounding_key(flat.layout.slots[piece.slot]) for piece in pieces}
        self.transfer = Transfer(self.label, pipeline, buffers, keys, flat.counted)
        self.counts: dict[Piece, int] = dict.fromkeys(pieces, 0)
        """The number of steps that each piece has made."""
        self.received = 0
        """Gradients that came since the last step."""
        self.updated_early = False
        """Whether this step's update was asked for in backward."""
        self._norm: Tensor | None = None
        """The norm of the first micro-batch's gradient, if it was computed on the device."""
        self._part_norms: dict[int, Tensor] | None = None
        """The norm of each parameter's part of it."""
        self._loading: tuple[Piece, str, Tensor] | None = None
        """The values of one moment in fp32, until they are encoded in 8 bits."""

    # -- values at rest -------------------------------------------------------------------------------------------

    @property
    def resting(self) -> Tensor | None:
        return self.buffers.resting

    @property
    def stored(self) -> Tensor:
        return self.buffers.stored

    def rounded(self, values: Tensor) -> Tensor:
        return round_to(values, self.flat.dtype)

    def move_in(self, values: Tensor) -> None:
        if not self.buffers.rests_here:
            self.transfer.publish_to(self.flat.own_parameters)
        self.adopt(values)

    def adopt(self, values: Tensor) -> None:
        self._pipeline.settle()
        self.held = False  # the adopted values are the newest
        buffers, transfer = self.buffers, self.transfer
        parameters = values
        if buffers.trained:
            parameters = round_to(values, buffers.dtype)
            buffers.store(values)
        for buffer in (buffers.high, buffers.resting, transfer.target if transfer.reads_back else None):
            if buffer is not None:
                buffer.copy_(parameters)

    def follow(self, values: Tensor) -> None:
        if self.buffers.trained:
            super().follow(values)
        else:
            self.adopt(values)

    def before_write(self) -> None:
        if self.transfer.reads_back and self._before_write is None:
            self._before_write = self.master()

    def master(self) -> Tensor:
        """The fp32 values of the master, on the CPU. A copy, if the master is split."""
        self._pipeline.settle()
        buffers = self.buffers
        if not buffers.split:
            return buffers.stored
        high = buffers.high
        if high is None:
            assert self.transfer.target is not None
            high = self.transfer.target.cpu()
        return join(high, buffers.stored)

    def loading(self) -> Tensor:
        return torch.zeros(self.buffers.numel, device="cpu") if self.joins_master else self.buffers.stored

    def shown(self) -> Tensor:
        self._pipeline.settle()
        shown = self.buffers.resting if self.transfer.target is None else self.transfer.target
        assert shown is not None
        return shown

    def hold(self, values: Tensor) -> None:
        self._pipeline.settle()
        buffers = self.buffers
        buffers.store(values)
        output = buffers.output(self.transfer.gradient.slot)
        if output is not buffers.stored:
            output.copy_(round_to(values, buffers.dtype))
        self.held = True

    def publish(self) -> SentParameters | None:
        if not self.buffers.trained:
            return None
        source = round_to(self.master(), self.buffers.dtype)
        self.held = False
        for target in (self.buffers.resting, self.transfer.target):
            if target is not None:
                target.copy_(source)
        publication = SentParameters(self._pipeline)
        publication.send(self._pipeline.now())
        return publication

    def before_gather(self, shard: Tensor) -> None:
        if self.buffers.resting is not None:
            self._pipeline.count(trace.UP, shard.nbytes)
            with trace.on_stream(trace.UP, self.label):
                shard.copy_(self.buffers.resting, non_blocking=True)

    def _expect_update(self) -> SentParameters:
        """Marks the parameters as outdated, until the returned publication is sent."""
        publication = SentParameters(self._pipeline)
        self.flat.outdate(publication)
        return publication

    # -- averaged gradients ---------------------------------------------------------------------------------------

    @property
    def has_gradient(self) -> bool:
        """Whether an averaged gradient came since the last step."""
        return self._stash.values is not None or self.received > 0

    def begin_backward(self) -> None:
        if self._step.in_backward and (self.updated_early or self.has_gradient):
            raise self._second_backward()
        if self.received:
            self._scale_now()  # factors are not meant for gradients that come later
        else:
            super().begin_backward()

    def take(self, gradient: Tensor, *, complete: bool) -> None:
        narrow = not self.flat.alone and not self.received
        values = gradient.to(self.flat.dtype) if narrow else gradient
        if not self._step.in_backward:
            publication = self._expect_update() if self._step.publishes_with(self) else None
            self._forget_norms()
            if self._pipeline.part_norms.expected and not self.received:
                self._part_norms = self._norms_of(values)
            self._norm = self.transfer.receive(values, publication, first=not self.received)
            self.received += 1
            return
        self.check_not_updated()
        if complete and not self.has_gradient:
            self._step.begin_updates()
            self._update_at_once(values, [True] * len(self.flat.parameters))
        else:
            # The gradient waits for step(). There the ranks have agreed on which parameters are in use, and all parts
            # of the gradient have come.
            self._stash.add(gradient, is_sum=self.flat.alone)

    def _scale_now(self) -> None:
        """Multiplies the gradient on the host, so that no factor is left."""
        groups = self.factors.groups(self.flat.gradient.there)
        self.factors.clear()
        if any(groups):
            self._forget_norms()
            device = self._pipeline.device
            self.transfer.scale([(multiplier(scaling, device), slots) for scaling, slots in groups.items()])

    def unify_factors(self) -> None:
        if self.received and self.factors.common(self.flat.gradient.there) is None:
            self._scale_now()
        else:
            super().unify_factors()

    def check_readable(self) -> None:
        if self._step.in_backward:
            raise RuntimeError(
                f"offload.update_in_backward: {self.label!r} is updated before all gradients are known, so its "
                "gradients can be neither read nor clipped nor changed; leave the option out"
            )

    def assign(self, slot: int, gradient: Tensor, scale: float) -> None:
        self.check_readable()
        super().assign(slot, gradient, scale)

    def _make_room(self, device: torch.device) -> None:
        if not self.received:
            self.take(torch.zeros(self.flat.own.numel, dtype=self.flat.dtype, device=device), complete=False)

    def change(self, slot: int, change: Change, scale: float) -> None:
        if not self.received:
            return
        self._forget_norms()
        factor = multiplier(self.factors.take(slot), self._pipeline.device)

        def with_factor(part: Tensor, cut: Cut) -> None:
            if factor is not None:
                part.mul_(factor.to(part.device))
            change(part, cut)

        landed = self.transfer.landed()
        for piece in self.counts:
            if piece.slot == slot:
                self._change_part(slot, landed.changing(piece), with_factor, scale)

    def expect_norms(self) -> None:
        self._pipeline.part_norms.asked = True

    def known_norms(self) -> dict[int, Tensor] | None:
        return self._part_norms

    def _norms_of(self, gradient: Tensor) -> dict[int, Tensor]:
        counted, pieces = gradient[self.flat.counted], self.flat.layout.pieces(self.flat.shard_range)
        parts = [counted[piece.offset :][: piece.numel] for piece in pieces]
        return dict(zip((piece.slot for piece in pieces), compat.norms(parts, torch.float64), strict=True))

    def _forget_norms(self) -> None:
        self._norm = self._part_norms = None

    def own_gradient(self) -> Tensor | None:
        return self.transfer.landed().value if self.received else None

    def norm(self) -> Tensor | None:
        if not self.received:
            return None
        if self._step.in_backward:
            raise RuntimeError(
                "offload.update_in_backward has updated before the norm of all gradients is known, so there is nothing "
                "left to clip; leave clip_grad_norm_() or the option out"
            )
        norm = self._norm
        if self.received > 1 or norm is None:
            norm = torch.tensor(self.transfer.square_sum() ** 0.5, dtype=torch.float64, device="cpu")
        return norm.to(self._pipeline.device, non_blocking=True)

    def discard(self, slot: int) -> None:
        self.check_not_updated()
        super().discard(slot)
        if self.received:
            self._forget_norms()
            self.transfer.change(lambda gradient: gradient.zero(slot))

    def forget(self) -> None:
        self.check_not_updated()
        super().forget()
        if self.received:
            self.transfer.change(HostGradient.empty)
        self.received = 0
        self._forget_norms()

    def check_not_updated(self) -> None:
        if self.updated_early:
            raise self._second_backward()

    def _second_backward(self) -> RuntimeError:
        return RuntimeError(
            f"offload.update_in_backward: {self.label!r} has had its one backward of this step, so its gradient "
            "can be neither dropped nor added to; call step() once after every backward, or leave the option out"
        )

    # -- update ---------------------------------------------------------------------------------------------------

    def expect_step(self, *, delayed: bool) -> SentParameters | None:
        """Called for all homes of a step before the first ``update``. Returns the publication; None if delayed."""
        self._stash.clear()
        return None if delayed else self._expect_update()

    def update(self, update: Update) -> None:
        """Asks for the update of this step."""
        self.held = update.publication is None
        self.acknowledge()
        self.transfer.update(update)

    def update_late(self) -> None:
        """Asks in ``step()`` for an update that could not be made in backward."""
        values = self._stash.values
        assert values is not None
        self._stash.clear()
        self._update_at_once(values, self.flat.gradient.used)
        self.acknowledge()

    def acknowledge(self) -> None:
        """Called in ``step()``, when the update is asked for: the gradient is used up."""
        self.received, self.updated_early = 0, False
        self._forget_norms()

    def _update_at_once(self, gradient: Tensor, used: list[bool]) -> None:
        """Asks for a copy of the gradient to the host, and for the update as soon as the copy is there."""
        self.check_not_updated()
        self.transfer.receive_and_update(gradient, self._step.rules(self, used), self._expect_update())
        self.received, self.updated_early = 1, True

    def publish_held(self) -> None:
        """Publishes a held update, if there is one, without waiting for a gradient."""
        if self.held:
            self.held = False
            self.transfer.publish_held(self._expect_update())

    # -- optimizer states, by piece -------------------------------------------------------------------------------

    def states(self) -> dict[Tensor, dict[str, Any]]:
        """Moments and step counts as torch's optimizers have them, for pieces that have made a step."""
        found = {}
        for piece, count in self.counts.items():
            if count:
                state: dict[str, Any] = dict(self.buffers.moments(piece))
                if self._step.counts_matter:
                    state["step"] = torch.tensor(float(count), device="cpu")
                found[self.flat.pieces[piece]] = state
        return found

    def room_for(self, piece: Piece, name: str, dtype: torch.dtype) -> Tensor | None:
        if not (self.buffers.coded and self.takes(name)):
            return self.buffers.moments(piece).get(name)
        self._encode_loaded()
        room = torch.empty(piece.numel, device="cpu")
        self._loading = piece, name, room
        return room

    def _encode_loaded(self) -> None:
        if self._loading is not None:
            self.buffers.store_moment(*self._loading)
            self._loading = None

    def take_scalars(self, piece: Piece, scalars: dict[str, Any], *, moments: bool) -> None:
        self._encode_loaded()
        count = int(scalars.get("step", 1 if moments else 0))
        if count:
            self.counts[piece] = count

    def forget_states(self) -> None:
        self._pipeline.wait()
        self._loading = None  # of a load that failed
        self.counts = dict.fromkeys(self.counts, 0)
        self.buffers.forget_moments()

    def takes(self, name: str) -> bool:
        return name in self.buffers.moment_names

    # -- asleep ---------------------------------------------------------------------------------------------------

    def resting_on_device(self) -> list[Tensor]:
        return [] if self.transfer.target is None else [self.transfer.target]

    def woke(self) -> None:
        if self.transfer.target is not None:
            self.transfer.publish_to(self.transfer.target)

    # -- for the ledger -------------------------------------------------------------------------------------------

    def on_device(self) -> StateTensors:
        gradients, accumulators = self._stash.tensors()
        return StateTensors([*gradients, *self.transfer.landing.values()], accumulators, [])

    def on_host(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name, tensor in list(self.buffers.tensors.items()):  # the mover may be adding the sum's buffer
            kind = STATE_KINDS.get(name, "optimizer_states")
            sizes[kind] = sizes.get(kind, 0) + tensor.nbytes
        return sizes


def _rounding_key(slot: Slot) -> int:
    """A number for each parameter, so that each is rounded differently. Parts of a divided parameter differ, too."""
    return zlib.crc32(f"{slot.name}{'' if slot.box is None else slot.box.offsets}".encode())
