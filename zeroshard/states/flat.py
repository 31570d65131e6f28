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

from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import Tensor, nn

from ..comm import parallel
from ..comm.fabric import Fabric
from ..comm.lane import Pending
from ..config.layout import FlatLayout, Piece, flat_layout
from ..config.options import Precision
from ..config.table import Extent, StateTable
from ..system import compat
from .device_home import DeviceHome
from .gradient import FlatGradient
from .home import Home, Publication
from .placeholder import Placeholders
from .pointing import PointedParameters
from .turns import Turns


class Presence(Enum):
    """Whether a flat's whole parameters can be read."""

    RELEASED = auto()
    """Their memory is given back; the shard is all there is."""
    UNDER_WAY = auto()
    """A gather fills them."""
    UPDATING = auto()
    """Whole at rest, and being updated on the host. Their gathers are issued in turn (``Turns``)."""
    PRESENT = auto()


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
        self.label, self.table, self.precision = label, table, precision
        boxes = {name: box for name, parameter in members if (box := parallel.box_of(parameter)) is not None}
        shapes = [(name, parallel.local(parameter).shape) for name, parameter in members]
        self.layout: FlatLayout = flat_layout(shapes, fabric.shards, boxes)
        self.divided = bool(boxes)
        """Whether tensor parallelism leaves this rank a part of each parameter."""
        self.alone = fabric.data_parallel == 1
        """Whether no other rank computes gradients of the same parameters."""
        self.parameters = [parameter for _, parameter in members]
        self.trainable = self.parameters[0].requires_grad
        self.origin_dtype = self.parameters[0].dtype
        self.dtype = precision.parameters or self.origin_dtype
        self.master_dtype = torch.float32 if precision.keeps_master and self.trainable else self.dtype
        self.shard_range = self.layout.shard(fabric.shard_rank)
        self.sharded = table.parameters.extent is Extent.SHARD
        self.at_rest = self.shard_range if self.sharded else self.layout.whole
        """The range of the parameters that this rank has at rest."""
        self.own = self.shard_range if table.optimizer.extent is Extent.SHARD else self.layout.whole
        """The range that this rank updates."""
        self.counted = slice(self.shard_range.start - self.own.start, self.shard_range.stop - self.own.start)
        """The part of ``own`` that counts for norms on this rank, so that no element counts twice."""
        self.home: Home = DeviceHome(self)
        """Where optimizer states and averaged gradients live."""
        self.presence = Presence.PRESENT
        self.lent = False
        """User code saw the parameters and may have stored a view: the storage is left to it, not emptied under it."""
        self._turns = Turns()
        self._publication: Publication | None = None
        self._fabric = fabric
        self._pending: Pending | None = None
        self.whole: Tensor
        self.shard: Tensor
        self.pieces: dict[Piece, Tensor] = {}
        """The parts of parameters that this rank updates, and the tensor that the optimizer has for each."""
        self._cuts: list[int] = []
        self._pointed = PointedParameters(self.parameters, self.layout.slots, self.dtype, placeholders)
        self._gradient = FlatGradient(self, fabric, placeholders) if self.trainable else None

    @property
    def gradient(self) -> FlatGradient:
        """The gradients of a trainable flat."""
        assert self._gradient is not None, f"{self.label} is frozen"
        return self._gradient

    @property
    def present(self) -> bool:
        """Whether the whole parameters can be read."""
        return self.presence is Presence.PRESENT

    @property
    def updating(self) -> bool:
        """Whether the whole parameters are at rest and wait for an update that is under way."""
        return self.presence is Presence.UPDATING

    @property
    def has_shard(self) -> bool:
        """Whether the shard has memory of its own on the device at rest."""
        return not self.home.fills_shard

    @property
    def own_parameters(self) -> Tensor:
        """The parameters of the range that this rank updates, where they rest on the device."""
        return self.shard if self.sharded else self.whole[self.own.start : self.own.stop]

    @property
    def parameters_at_rest(self) -> Tensor:
        """The parameters that this rank has at rest, where they are."""
        if self.home.resting is not None:
            return self.home.resting
        return self.shard if self.sharded else self.whole

    def by_piece(self, own: Tensor) -> Sequence[Tensor]:
        """Cuts a tensor of the ``own`` range into pieces. One ``split``: a slice for each piece would cost as much."""
        parts: tuple[Tensor, ...] = own.split(self._cuts)
        return parts[1::2]

    def live_in(self, home: Home, turns: Turns) -> None:
        """Gets another home than the device's, before the first values come."""
        self.home, self._turns = home, turns

    # -- start ----------------------------------------------------------------------------------------------------

    def new_origin(self) -> Tensor:
        """A whole flat for the first values, in the most precise dtype that will be kept."""
        return torch.zeros(self.layout.numel, dtype=self.master_dtype, device=self._fabric.device)

    def views_of(self, whole: Tensor) -> list[Tensor]:
        """The parameters as views of a whole flat."""
        return [slot.view(whole) for slot in self.layout.slots]

    def adopt(self, origin: Tensor) -> None:
        """Takes rank 0's first values; this rank stores its range of them."""
        self._fabric.broadcast(origin, divided=self.divided)
        self.start_from(origin[self.at_rest.start : self.at_rest.stop].clone() if self.sharded else origin)

    def start_from(self, values: Tensor) -> None:
        """Takes the first values of the range at rest, in the master's dtype. Parameters point here from now on."""
        if self.sharded:
            self.whole = torch.empty(self.layout.numel, dtype=self.dtype, device=self._fabric.device)
            place = slice(self.shard_range.start, self.shard_range.stop)
            self.shard = self.home.rounded(values) if self.has_shard else self.whole[place]
        else:
            self.whole = self.home.rounded(values)
            self.shard = self.whole[self.shard_range.start : self.shard_range.stop]
        self.home.move_in(values if self.sharded else values[self.own.start : self.own.stop])
        if self.trainable:
            pieces, stored = self.layout.pieces(self.own), self.home.stored
            self.pieces = {piece: stored[piece.offset :][: piece.numel] for piece in pieces}
            self._cuts = _cuts(pieces, self.own.numel)
        self._pointed.show(self.views_of(self.whole))
        if self.sharded:
            self.release()

    # -- gather and release ---------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Starts making the whole parameters exist. Nothing to do where they are present or under way."""
        if self.updating:
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
            self.home.before_gather(self.shard)

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
        self._finish_gather()
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
        """Makes an updated master visible: in the parameters' dtype, and to the other ranks where they are whole."""
        with compat.label(f"zeroshard.publish {self.label}"):
            self._finish_gather()
            publication = self.home.publish()
            self.outdate(publication)
            if publication is None and self.trainable and not self.sharded and self.own.numel != self.layout.numel:
                self._pointed.hide()
                self._pending = self._fabric.gathers.all_gather(self.whole, self.shard, self.label)
                self.presence = Presence.UNDER_WAY

    def outdate(self, publication: Publication | None) -> None:
        """Notes that the parameters change. Whoever needs them from now on waits for the publication, if any."""
        # Backward through old values must raise, and a unit that is still gathered shows old values.
        self._finish_gather()
        self._pointed.outdate()
        if self.sharded:
            self.release()
        elif publication is not None and self.presence is not Presence.UPDATING:
            self.home.after_write()
            self._pointed.hide()
            self.presence = Presence.UPDATING
            self._turns.expect(self)
        self._publication = publication

    def _finish_gather(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def rewrite(self) -> None:
        """Takes rank 0's present values as the new ones. A master keeps its lower bits where nothing was changed."""
        assert self.presence is Presence.PRESENT
        self._fabric.broadcast(self.whole, divided=self.divided)
        if self.sharded and self.has_shard:
            self.shard.copy_(self.whole[self.shard_range.start : self.shard_range.stop])
        self.refresh_master()

    def refresh_master(self) -> None:
        """Makes the master follow parameters that were written where they are, after ``home.before_write``."""
        self._pointed.accept_writes()
        self.home.follow(self.whole[self.own.start : self.own.stop])

    def take_written_names(self) -> list[str]:
        """Names of parameters written in place since this was last asked."""
        return self._pointed.take_written_names()

    def check_unwritten(self) -> None:
        """Raises if somebody wrote to a parameter where the write would be lost.

        That is: to a placeholder, to gathered parameters that are about to be released, or to 16-bit parameters
        that a master stands behind.
        """
        present = self.presence is Presence.PRESENT
        self._pointed.check(present, writes_count=present and not self.sharded and not self.home.separate_master)


def _cuts(pieces: Sequence[Piece], numel: int) -> list[int]:
    """Sizes of the gap before the first piece, that piece, the gap before the next, and so on to the end."""
    sizes, end = [], 0
    for piece in pieces:
        sizes += [piece.offset - end, piece.numel]
        end = piece.offset + piece.numel
    return [*sizes, numel - end]
