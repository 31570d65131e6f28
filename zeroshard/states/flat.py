"""A flat: parameters of a unit in one buffer, and who owns their memory.

Every kind of tensor in the package, by name:

- **whole**: a flat's whole parameters, padding included. The model's parameters are views of it while it is *present*.
- **shard**: this rank's slice of the parameters at rest. The shard is a view of ``whole`` in two cases: the table says
  whole, or every gather fills the shard from the flat's home.
- **master**: the values that the optimizer updates, of the range that this rank is responsible for. The master is in
  fp32 behind 16-bit parameters, else it is the parameters themselves. If optimizer states live on the host, the master
  is there too, behind parameters of any dtype.
- **piece**: the part of one parameter inside the master. Optimizer states belong to pieces.
- **local, stash, accumulator**: gradients; see ``gradient.py`` and ``stash.py``.

A release empties the storage and leaves the tensor: autograd's saved views of a parameter still point at the storage,
and are valid again after the next gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from itertools import compress

import torch
from torch import Tensor, nn

from ..comm import parallel
from ..comm.fabric import Fabric
from ..comm.lane import Gather, Pending
from ..config.layout import FlatLayout, Piece, flat_layout
from ..config.options import Precision
from ..config.table import Extent, StateTable
from ..shown import absent
from ..shown.absent import Reader
from ..shown.parameters import ShownParameters
from ..shown.placeholder import Placeholders
from ..system import compat
from .device_home import DeviceHome
from .gradient import FlatGradient
from .home import Home, Publication
from .turns import Turns
from .writes import Writes

SLEEPING = "the model's states sleep in host memory; call zeroshard.restore_states(model) first, on all ranks"


class Presence(Enum):
    """Whether a flat's whole parameters can be read."""

    RELEASED = auto()
    """Their memory is given back. Only the shard exists."""
    UNDER_WAY = auto()
    """A gather fills them."""
    UPDATING = auto()
    """They are whole at rest, and the host updates them. Their gathers are issued in turn (``Turns``)."""
    ASLEEP = auto()
    """All states of the flat wait in host memory (``sleep.py``). Whoever needs them is refused."""
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
        self._names = {id(parameter): name for name, parameter in members}
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
        """The part of ``own`` that counts for norms on this rank. No element counts on two ranks."""
        self._in_parts = self.sharded or self.own.numel != self.layout.numel
        """Whether the whole parameters are put together from the parts that ranks have or update."""
        self.home: Home = DeviceHome(self)
        """Where optimizer states and averaged gradients live."""
        self.presence = Presence.PRESENT
        self.lent = False
        """User code saw the parameters and may have stored a view. A release then leaves the storage to that view."""
        self.writes = Writes(self)
        """What user code writes to the parameters."""
        self.reader: Reader | None = None
        """Brings values to user code that uses absent parameters. None until the model is sharded."""
        self._turns = Turns()
        self._publication: Publication | None = None
        self._fabric = fabric
        self._pending: Pending | None = None
        self.whole: Tensor
        self.shard: Tensor
        self.pieces: dict[Piece, Tensor] = {}
        """The parts of parameters that this rank updates, and the tensor that the optimizer has for each."""
        self._cuts: list[int] = []
        """Sizes of the pieces and of the gaps between them, in order."""
        self._is_piece: list[bool] = []
        """For each of these sizes: whether it is a piece's."""
        self.shown = ShownParameters(self.parameters, self.layout.slots, self.dtype, placeholders)
        if self.trainable:
            self.gradient = FlatGradient(self, fabric, placeholders)
            """The gradients. A frozen flat has none."""
        absent.register(self)

    def name_of(self, parameter: Tensor) -> str:
        """The name of one of the parameters, in the model."""
        return self._names[id(parameter)]

    @property
    def present(self) -> bool:
        """Whether the whole parameters can be read."""
        return self.presence is Presence.PRESENT

    @property
    def watched(self) -> bool:
        """Whether every use of the parameters is seen: they are absent, or shown to user code."""
        return self.shown.watched

    @property
    def updating(self) -> bool:
        """Whether the whole parameters are at rest and wait for an update that is under way."""
        return self.presence is Presence.UPDATING

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
        """Cuts a tensor of the ``own`` range into pieces. One call costs as much as two slices."""
        parts = own.split_with_sizes(self._cuts)
        return parts if len(parts) == len(self.pieces) else list(compress(parts, self._is_piece))

    def live_in(self, home: Home, turns: Turns) -> None:
        """Moves the flat to another home than the device's. Called before the first values come."""
        self.home, self._turns = home, turns

    # -- start ----------------------------------------------------------------------------------------------------

    def new_origin(self) -> Tensor:
        """A whole flat for the first values, in the master's dtype."""
        return torch.zeros(self.layout.numel, dtype=self.master_dtype, device=self._fabric.device)

    def views_of(self, whole: Tensor) -> list[Tensor]:
        """The parameters as views of a whole flat."""
        return [slot.view(whole) for slot in self.layout.slots]

    def adopt(self, origin: Tensor) -> None:
        """Takes rank 0's first values. This rank stores its range of them."""
        self._fabric.broadcast(origin, divided=self.divided)
        self.start_from(origin[self.at_rest.start : self.at_rest.stop].clone() if self.sharded else origin)

    def start_from(self, values: Tensor) -> None:
        """Takes the first values of the range at rest, in the master's dtype. Parameters point here from now on."""
        if self.sharded:
            self.whole = torch.empty(self.layout.numel, dtype=self.dtype, device=self._fabric.device)
        else:
            self.whole = self.home.rounded(values)
        own_memory = self.sharded and not self.home.fills_shard
        self.shard = self.home.rounded(values) if own_memory else self._shard_of(self.whole)
        self.home.move_in(values if self.sharded else values[self.own.start : self.own.stop])
        if self.trainable:
            pieces, stored = self.layout.pieces(self.own), self.home.stored
            self.pieces = {piece: stored[piece.offset :][: piece.numel] for piece in pieces}
            self._cuts, self._is_piece = _cuts(pieces, self.own.numel)
        self.shown.views = self.views_of(self.whole)
        self.shown.show()
        self.release()
        self.watch()

    def _shard_of(self, whole: Tensor) -> Tensor:
        return whole[self.shard_range.start : self.shard_range.stop]

    # -- gather and release ---------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Starts making the whole parameters exist. Does nothing if they are present or under way."""
        if self.presence is Presence.RELEASED:
            self.start_gather()
        elif self.presence is Presence.UPDATING:
            self._turns.gather_up_to(self)
        elif self.presence is Presence.ASLEEP:
            raise self.asleep()

    def prefetch(self) -> None:
        """Gathers ahead of need. If that has to wait for the host: only where other ranks wait for this rank."""
        if self._publication is None or self._publication.sent or self.gathers_from_others:
            self.gather()

    @property
    def gathers_from_others(self) -> bool:
        """Whether a gather is a collective."""
        return self._fabric.shards > 1 and self._in_parts

    def start_gather(self) -> None:
        """Starts a gather of parameters that are released, or that are updating and next in turn."""
        publication = self._publication

        def prepare() -> None:
            if self.sharded:
                self.whole.untyped_storage().resize_(self.layout.numel * self.dtype.itemsize)
            if publication is not None:
                publication.wait()
            self.home.before_gather(self.shard)

        with compat.label("zeroshard.gather", self.label):
            if self._in_parts:
                self._pending = self._fabric.gathers.all_gather(self.whole, self.shard, self.label, prepare)
            else:
                self._pending = publication
        self._publication = None  # only now: if the wait was interrupted, the next call waits again
        self.presence = Presence.UNDER_WAY

    def wait(self, *, watched: bool = False) -> None:
        """Makes gathered parameters readable. They must be at rest or under way.

        ``watched``: for user code, whose every use of them is seen. Else for a pass of the model.
        """
        assert self.presence is not Presence.RELEASED, f"{self.label} was not gathered"
        if self.presence is Presence.UPDATING or self.presence is Presence.ASLEEP:
            self.gather()
        if self.presence is Presence.UNDER_WAY:
            if self._pending is not None:
                with compat.label("zeroshard.wait", self.label):
                    self._pending.wait()
                self._pending = None
            self.shown.show(watched=watched)
            self.presence = Presence.PRESENT
        elif not watched:
            self.unwatch()
            if not self.sharded:
                self.writes.check_data()

    def watch(self) -> None:
        """Called when no pass of the model needs the parameters. Uses that would be lost are seen from now on."""
        if self.present and not self.shown.watched and not self.takes_writes:
            self.shown.watch()

    def unwatch(self) -> None:
        """Called before a pass of the model uses parameters that are present."""
        if self.present and self.shown.watched:
            self.shown.unwatch()

    def wait_if_whole(self) -> None:
        """Waits for an update that is being published, where parameters are whole at rest, so that users can read."""
        if not self.sharded:
            self.wait(watched=not self.takes_writes)

    def release(self) -> None:
        """Gives the whole parameters' memory back. Does nothing if they are whole at rest."""
        if not self.sharded or self.presence in (Presence.RELEASED, Presence.ASLEEP):
            return
        self.finish_gather()
        written = False
        if self.presence is Presence.PRESENT:
            self.writes.end_load()
            self.writes.check_versions()
            written = self.writes.past_autograd()
            self.shown.hide()
        if self.lent or not self.whole.untyped_storage().resizable():  # numpy may use the memory
            self.lent = False
            with torch.inference_mode(False):  # else no later pass could train with this memory
                self.whole = torch.empty_like(self.whole)
                self.shown.views = self.views_of(self.whole)
                if self.home.fills_shard:
                    self.shard = self._shard_of(self.whole)
        self.whole.untyped_storage().resize_(0)
        self.presence = Presence.RELEASED
        if written:
            raise self.writes.lost()

    def asleep(self) -> RuntimeError:
        """The error of whoever needs the parameters while they sleep."""
        return RuntimeError(f"the parameters of {self.label!r} are needed, and {SLEEPING}")

    def lend(self, *, data: bool = False) -> None:
        """Notes that user code sees the parameters. ``data``: also ``.data`` or ``to_local()``.

        A write to these, or to numpy's view of memory of the CPU, is found out later, if it would be lost.
        """
        if self.takes_writes:
            return
        self.lent = self.sharded
        if data or self.whole.device.type == "cpu":
            self.writes.expect()

    # -- publish --------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Makes an updated master visible: in the parameters' dtype, and to other ranks if parameters are whole."""
        with compat.label("zeroshard.publish", self.label):
            self.finish_gather()
            if self.replace(self.home.publish()):
                self.arrive(self._fabric.gathers.all_gather(self.whole, self.shard, self.label))

    def replace(self, publication: Publication | None = None) -> bool:
        """Notes that the parameters at rest have new values, or will have. True if ranks must now gather them."""
        self.writes.forget()  # an update checks before; a checkpoint that is loaded replaces all values
        self.outdate(publication)
        return publication is None and self.trainable and not self.sharded and self._in_parts

    def arrive(self, pending: Pending) -> None:
        """Notes that new values of the whole parameters are under way."""
        self.shown.hide()
        self._pending, self.presence = pending, Presence.UNDER_WAY

    def outdate(self, publication: Publication | None) -> None:
        """Notes that the parameters change. From now on, ``gather`` and ``wait`` wait for the publication, if any.

        A backward through the old values raises. A unit that is still gathered is released: it shows old values.
        """
        self.writes.check_data()
        self.finish_gather()
        self.shown.outdate()
        if self.sharded:
            self.release()
        elif publication is not None and self.presence is not Presence.UPDATING:
            self.home.after_write()
            self.shown.hide()
            self.presence = Presence.UPDATING
            self._turns.expect(self)
        else:
            self.watch()
        self._publication = publication

    def finish_gather(self) -> None:
        """Waits for a gather that is under way, because what it reads or writes is about to change."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    @property
    def takes_writes(self) -> bool:
        """Whether a write to the parameters lasts: they are whole at rest, and no master stands behind them."""
        return not self.sharded and not self.home.separate_master

    def take_written(self) -> None:
        """Makes shard and master follow parameters that were written where they are, after ``home.before_write``."""
        if self.sharded and not self.home.fills_shard:
            self.shard.copy_(self._shard_of(self.whole))
        self.shown.accept_writes()
        self.home.follow(self.whole[self.own.start : self.own.stop])

    def rewrite(self) -> None:
        """Takes rank 0's present values as new values. Where a value is unchanged, the master is unchanged too."""
        assert self.presence is Presence.PRESENT
        self._fabric.broadcast(self.whole, divided=self.divided)
        self.take_written()


def publish_rounded(flats: Sequence[Flat], fabric: Fabric) -> None:
    """Publishes flats whose parameters at rest have the masters' values already. No gather of them is under way."""
    with compat.label("zeroshard.publish", *(flat.label for flat in flats)):
        gathered = [flat for flat in flats if flat.replace()]
        gathers = [Gather(flat.whole, flat.shard, flat.label) for flat in gathered]
        for flat, pending in zip(gathered, fabric.gathers.all_gather_together(gathers), strict=True):
            flat.arrive(pending)


def _cuts(pieces: Sequence[Piece], numel: int) -> tuple[list[int], list[bool]]:
    """The sizes of pieces and of gaps around them, in order, and which of them are pieces. Empty gaps are left out."""
    sizes, is_piece, end = [], [], 0
    for piece in pieces:
        if piece.offset > end:
            sizes.append(piece.offset - end)
            is_piece.append(False)
        sizes.append(piece.numel)
        is_piece.append(True)
        end = piece.offset + piece.numel
    return ([*sizes, numel - end], [*is_piece, False]) if numel > end else (sizes, is_piece)
