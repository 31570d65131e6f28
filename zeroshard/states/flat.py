"""A flat: parameters of a unit in one buffer, and who owns their memory.

Every kind of tensor in the package, by name:

- **whole**: a flat's whole parameters, padding included. The model's parameters are views of it while it is *present*.
- **shard**: this rank's slice of the parameters at rest. A view of ``whole`` where the table says whole, and where it
  is cast from the master at every gather.
- **master**: what the optimizer updates: the range this rank is responsible for, in fp32 behind 16-bit parameters,
  else the parameters themselves. Where optimizer states live on the host it is there, behind parameters of any dtype.
- **piece**: the part of one parameter inside the master. Optimizer states belong to pieces.
- **local, stash, accumulator**: gradients; see ``gradient.py``.

Memory is given back with the storage, not with the tensor: autograd's saved views of a parameter keep pointing at the
storage and are valid again after the next gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..comm import parallel
from ..comm.fabric import Fabric
from ..comm.lane import Pending
from ..config.layout import FlatLayout, Range, flat_layout
from ..config.options import Precision
from ..config.table import Extent, StateTable
from ..offload.pipeline import Publication
from ..offload.shard import HostShard
from ..offload.states import round_to
from ..system import compat
from .gradient import FlatGradient
from .placeholder import Placeholders
from .pointing import PointedParameters


class Presence(Enum):
    """Whether a flat's whole parameters can be read."""

    RELEASED = auto()
    """Their memory is given back; the shard is all there is."""
    UNDER_WAY = auto()
    """A gather fills them."""
    UPDATING = auto()
    """Whole at rest, and being updated on the host. Their gathers are issued in turn (``Turns``)."""
    PRESENT = auto()


class MasterPiece(NamedTuple):
    """The tensor that the optimizer updates for one parameter on this rank."""

    slot: int
    """Index of the parameter in its flat."""
    start: int
    """First element, counted inside the parameter."""
    offset: int
    """First element, counted inside the master."""
    tensor: Tensor


class Flat:
    """Parameters of one unit, one dtype and one trainability in one contiguous, padded buffer."""

    def __init__(
        self,
        label: str,
        members: Sequence[tuple[str, nn.Parameter]],
        *,
        table: StateTable,
        precision: Precision,
        fabric: Fabric,
        placeholders: Placeholders,
    ) -> None:
        self.label = label
        boxes = {name: box for name, parameter in members if (box := parallel.box_of(parameter)) is not None}
        shapes = [(name, parallel.local(parameter).shape) for name, parameter in members]
        self.layout: FlatLayout = flat_layout(shapes, fabric.shards, boxes)
        self.divided = bool(boxes)
        """Whether tensor parallelism leaves this rank a part of each parameter."""
        self.parameters = [parameter for _, parameter in members]
        self.trainable = self.parameters[0].requires_grad
        self.host: HostShard | None = None
        """This rank's states in host memory, where they live there."""
        self.origin_dtype = self.parameters[0].dtype
        self.dtype = precision.parameters or self.origin_dtype
        self.master_dtype = torch.float32 if precision.keeps_master and self.trainable else self.dtype
        self.shard_range = self.layout.shard(fabric.shard_rank)
        self.own = self.shard_range if table.optimizer.extent is Extent.SHARD else self.layout.whole
        self.sharded = table.parameters.extent is Extent.SHARD
        self.casts_on_gather = precision.cast_on_gather and self.sharded and self.separate_master
        self.presence = Presence.PRESENT
        self.lent = False
        """User code saw the parameters and may have kept a view: the storage is left to it, not emptied under it."""
        self._turns = Turns()
        self._old_master: Tensor | None = None
        self._publication: Publication | None = None
        self._fabric = fabric
        self._pending: Pending | None = None
        self.whole: Tensor
        self.shard: Tensor
        self._master: Tensor
        self.pieces: list[MasterPiece] = []
        self._cuts: list[int] = []
        self._pointed = PointedParameters(self.parameters, self.layout.slots, self.dtype, placeholders)
        self.gradient: FlatGradient | None = None
        if self.trainable:
            self.gradient = FlatGradient(
                label,
                self.layout,
                self.parameters,
                self.dtype,
                own=self.own,
                table=table,
                precision=precision,
                fabric=fabric,
                placeholders=placeholders,
            )

    @property
    def separate_master(self) -> bool:
        """Whether the master is a copy of its own rather than the parameters themselves."""
        return self.trainable and (self.master_dtype is not self.dtype or self.host is not None)

    @property
    def rests_on_host(self) -> bool:
        """Whether the shard lives in host memory."""
        return self.host is not None and self.host.states.resting is not None

    @property
    def has_shard(self) -> bool:
        """Whether the shard has memory of its own on the device at rest."""
        return not self.casts_on_gather and not self.rests_on_host

    @property
    def master(self) -> Tensor:
        """The master; a copy of it where it lives on the host."""
        if self.host is not None and self.trainable:
            return self.host.master().to(self._fabric.device)
        return self._master

    def own_values(self) -> Tensor:
        """The master where it is, on the device or on the host; put together where it is split."""
        return self._master if self.host is None else self.host.master()

    def kept_values(self) -> Tensor:
        """The parameters of the kept range, at rest."""
        if self.rests_on_host:
            assert self.host is not None
            assert self.host.states.resting is not None
            return self.host.states.resting
        return self.shard if self.sharded else self.whole

    def by_piece(self, own: Tensor) -> Sequence[Tensor]:
        """A tensor of the range that this rank updates, cut into pieces: one call for all, for each costs as much."""
        parts: tuple[Tensor, ...] = own.split(self._cuts)
        return parts[1::2]

    def live_on(self, host: HostShard, turns: Turns) -> None:
        """Keeps the states on the host; asked before the first values come."""
        self.host, self._turns = host, turns

    # -- start ----------------------------------------------------------------------------------------------------

    def new_origin(self) -> Tensor:
        """A whole flat for the first values, in the most precise dtype that will be kept."""
        return torch.zeros(self.layout.numel, dtype=self.master_dtype, device=self._fabric.device)

    def views_of(self, whole: Tensor) -> list[Tensor]:
        """The parameters as views of a whole flat."""
        return [slot.view(whole) for slot in self.layout.slots]

    @property
    def kept(self) -> Range:
        """The range of the parameters that this rank keeps at rest."""
        return self.shard_range if self.sharded else self.layout.whole

    def adopt(self, origin: Tensor) -> None:
        """Takes rank 0's first values; this rank keeps its range of them."""
        self._fabric.broadcast(origin, divided=self.divided)
        self.keep(origin[self.kept.start : self.kept.stop].clone() if self.sharded else origin)

    def keep(self, values: Tensor) -> None:
        """Takes the first values of the kept range, in the master's dtype; parameters point here from now."""
        if self.sharded:
            self.whole = torch.empty(self.layout.numel, dtype=self.dtype, device=self._fabric.device)
            place = slice(self.shard_range.start, self.shard_range.stop)
            self.shard = self._rounded(values) if self.has_shard else self.whole[place]
            own = values
        else:
            self.whole = self._rounded(values)
            self.shard = self.whole[self.shard_range.start : self.shard_range.stop]
            own = values[self.own.start : self.own.stop]
        if self.host is not None:
            self._keep_on_host(self.host, own)
        elif self.separate_master:
            self._master = own.clone() if own.numel() < values.numel() else own  # a view would hold all of the values
        else:
            self._master = self.shard if self.sharded else self.whole[self.own.start : self.own.stop]
        if self.trainable:
            stored = self._master if self.host is None else self.host.states.stored
            self.pieces = [
                MasterPiece(piece.slot, piece.start, piece.offset, stored[piece.offset :][: piece.numel])
                for piece in self.layout.pieces(self.own)
            ]
            self._cuts = _cuts(self.pieces, self.own.numel)
        self._pointed.show(self.views_of(self.whole))
        if self.sharded:
            self.release()

    def _rounded(self, values: Tensor) -> Tensor:
        """Values in the parameters' dtype, as whoever publishes them rounds them."""
        return values.to(self.dtype) if self.host is None else round_to(values, self.dtype)

    def _keep_on_host(self, host: HostShard, values: Tensor) -> None:
        target = self.shard if self.sharded else self.whole[self.own.start : self.own.stop]
        counted = slice(self.shard_range.start - self.own.start, self.shard_range.stop - self.own.start)
        host.rest_at(None if self.rests_on_host else target, counted)
        host.adopt(values)

    # -- gather and release ---------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Starts making the whole parameters exist. Nothing to do where they are present or under way."""
        if self.presence is Presence.UPDATING:
            self._turns.gather_up_to(self)
        elif self.presence is Presence.RELEASED:
            self.start_gather()

    def prefetch(self) -> None:
        """Gathers ahead of need: where that would wait for the host, only if other ranks wait for us too."""
        if self._publication is None or self._publication.sent or self.gathers_from_others:
            self.gather()

    @property
    def gathers_from_others(self) -> bool:
        """Whether a gather is a collective."""
        return self._fabric.shards > 1 and (self.sharded or self.own.numel != self.layout.numel)

    def start_gather(self) -> None:
        """Of parameters that are released, or updating and next in turn."""
        publication = self._publication

        def prepare() -> None:
            if self.sharded:
                self.whole.untyped_storage().resize_(self.layout.numel * self.dtype.itemsize)
            if publication is not None:
                publication.wait()
            if self.casts_on_gather:
                self.shard.copy_(self._master)
            if self.rests_on_host:
                assert self.host is not None
                self.host.copy_resting_to(self.shard)

        with compat.label(f"zeroshard.gather {self.label}"):
            lane = self._fabric.gathers
            if self.sharded or self.own.numel != self.layout.numel:
                self._pending = lane.all_gather(self.whole, self.shard, self.label, prepare)
            else:
                self._pending = publication
        self._publication = None  # not before: an interrupted wait for it is waited for again
        self.presence = Presence.UNDER_WAY

    def wait(self) -> None:
        """Makes gathered parameters readable. They must be at rest or under way."""
        assert self.presence is not Presence.RELEASED, f"{self.label} was not gathered"
        if self.presence is Presence.UPDATING:
            self.gather()
        if self.presence is Presence.UNDER_WAY:
            if self._pending is not None:
                with compat.label(f"zeroshard.wait {self.label}"):
                    self._pending.wait()
                self._pending = None
            self.check_unwritten()
            self._pointed.show()
            self.presence = Presence.PRESENT

    def wait_if_whole(self) -> None:
        """Waits for an update that is being published, where parameters are whole at rest."""
        if not self.sharded:
            self.wait()

    def release(self) -> None:
        """Gives the whole parameters' memory back. Nothing to do where they are whole at rest."""
        if not self.sharded or self.presence is Presence.RELEASED:
            return
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if self.presence is Presence.PRESENT:
            self.check_unwritten()
            self._pointed.hide()
        if self.lent or not self.whole.untyped_storage().resizable():  # numpy holds on to what it was shown
            self.lent = False
            self.whole = torch.empty_like(self.whole)
            self._pointed.views = self.views_of(self.whole)
            if not self.has_shard:
                self.shard = self.whole[self.shard_range.start : self.shard_range.stop]
        self.whole.untyped_storage().resize_(0)
        self.presence = Presence.RELEASED

    # -- publish --------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Makes an updated master visible: into the parameters' dtype, and to the other ranks where they are whole."""
        with compat.label(f"zeroshard.publish {self.label}"):
            if not self.trainable:  # loaded, by every rank for itself
                self._outdate()
                return
            if self.host is not None:
                self._outdate()
                self._publication = self.host.publish_all()
                return
            if self.separate_master and not self.casts_on_gather:
                target = self.shard if self.sharded else self.whole[self.own.start : self.own.stop]
                target.copy_(self._master)
            self._outdate()
            if not self.sharded and self.own.numel != self.layout.numel:
                self._pointed.hide()
                self._pending = self._fabric.gathers.all_gather(self.whole, self.shard, self.label)
                self.presence = Presence.UNDER_WAY

    def expect_update(self) -> Publication:
        """The host will change the parameters: whoever needs them from now on waits for the publication."""
        assert self.host is not None
        self._outdate()
        self._publication = self.host.new_publication()
        return self._publication

    def _outdate(self) -> None:
        """What was read of the parameters is no longer what they are."""
        if self._pending is not None:
            self._pending.wait()  # an earlier publish that nobody needed
            self._pending = None
        self._pointed.outdate()
        if self.sharded:
            self.release()  # a unit that was still gathered shows an old value
        elif self.host is not None and self.presence is not Presence.UPDATING:
            self._old_master = None
            self._pointed.hide()
            self.presence = Presence.UPDATING
            self._turns.expect(self)

    def rewrite(self) -> None:
        """Takes rank 0's present values as the new ones. A master keeps its lower bits where nothing was changed."""
        assert self.presence is Presence.PRESENT
        self._fabric.broadcast(self.whole, divided=self.divided)
        if self.sharded and self.has_shard:
            self.shard.copy_(self.whole[self.shard_range.start : self.shard_range.stop])
        if self.host is not None and not self.trainable:
            self.host.adopt(self.whole[self.shard_range.start : self.shard_range.stop])
        self.refresh_master()

    def before_write(self) -> None:
        """Remembers a master that cannot be put together again once the parameters are written."""
        if self.host is not None and self.host.reads_back and self._old_master is None:
            self._old_master = self.host.master()

    def after_write(self) -> None:
        """Forgets what ``before_write`` remembers."""
        self._old_master = None

    def refresh_master(self) -> None:
        """Makes the master follow parameters that were written where they are, after ``before_write``."""
        self._pointed.accept_writes()
        if self.separate_master:
            values, master = self.whole[self.own.start : self.own.stop], self._old_master
            master = self.master if master is None else master.to(values.device)
            new = torch.where(self._rounded(master) == values, master, values.to(master.dtype))
            if self.host is not None:
                self.host.adopt(new)
            else:
                self._master.copy_(new)

    def take_written_names(self) -> list[str]:
        """Parameters written in place since they were pointed where they are; asked again it names none."""
        return self._pointed.take_written_names()

    def check_unwritten(self) -> None:
        """Raises if somebody wrote to a parameter where the write would be lost.

        That is: to a placeholder, to gathered parameters that are about to be released, or to 16-bit parameters
        that a master stands behind.
        """
        present = self.presence is Presence.PRESENT
        self._pointed.check(present, writes_count=present and not self.sharded and not self.separate_master)


def gradient_of(flat: Flat) -> FlatGradient:
    """The gradient of a trainable flat."""
    assert flat.gradient is not None
    return flat.gradient


def _cuts(pieces: Sequence[MasterPiece], numel: int) -> list[int]:
    """Sizes of the gap before the first piece, that piece, the gap before the next, and so on to the end."""
    sizes, end = [], 0
    for piece in pieces:
        sizes += [piece.offset - end, piece.tensor.numel()]
        end = piece.offset + piece.tensor.numel()
    return [*sizes, numel - end]


class Turns:
    """The one order in which all ranks gather flats that the host updates: ranks differ in when each is updated."""

    def __init__(self) -> None:
        self.order: Callable[[], list[Flat]] = list
        """Gives the order; the same list as before unless it has changed."""
        self._known: list[Flat] | None = None
        self._place: dict[Flat, int] = {}
        self._first = 0
        """Flats before this place in the order are not being updated."""

    def expect(self, flat: Flat) -> None:
        """Notes that the host updates a flat from now on."""
        self._look_up()
        assert flat in self._place, f"{flat.label} is in no order of publishing"
        self._first = min(self._first, self._place[flat])

    def gather_up_to(self, flat: Flat) -> None:
        """Gathers what comes before a flat, and that flat. In a step every flat is passed once."""
        order = self._look_up()
        while self._first <= self._place[flat]:
            other = order[self._first]
            if other.presence is Presence.UPDATING:
                other.start_gather()
            self._first += 1  # not before: a gather that failed is asked for again

    def _look_up(self) -> list[Flat]:
        order = self.order()
        if order is not self._known:
            self._known, self._first = order, 0
            self._place = {flat: place for place, flat in enumerate(order)}
        return order
