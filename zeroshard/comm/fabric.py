"""The ranks that share a model, and every collective between them.

Model states travel on two *lanes* (``lane``): **gathers** carries parameters, **reduces** carries gradients. There are
two because all ranks need parameters in the same order, but gradients may be ready in a different order on each rank.
What the ranks must agree on travels from host to host (``exchange``), and never waits for the device. Only this room
talks to ``torch.distributed`` about model states.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..config.bounds import MESSAGE_BYTES
from ..system import compat_groups, machine
from ..system.device import device_ranks, local_ranks
from ..system.waits import Cause, Waits
from .exchange import DisagreementError as DisagreementError  # other rooms know this file alone
from .exchange import Exchange
from .grid import Grid, grid
from .lane import Lane
from .lookout import Lookout
from .meeting import Meeting
from .messages import in_messages, pack, unpack
from .posts import Posts
from .process_group import backend_for, warn_of_gloo
from .store import BoundedStore
from .traffic import RankVolume
from .transport import transport_for
from .watchdog import Watchdog

LONELY_BACKENDS = {"fake"}
"""Backends with which one rank runs without the other ranks of its world."""


class Fabric:
    """The ranks that share a model: who they are, the lanes between them, and what they must agree on.

    With a two-dimensional mesh, the ranks of a row divide the states, and rows are replicas of each other. Gathers and
    reduces stay inside a row. The shards of averaged gradients are then averaged once more over the replicas.

    With tensor parallelism each tensor-parallel rank has rows of its own. Model states never pass from one
    tensor-parallel rank to another. Only decisions and activations do.
    """

    def __init__(
        self,
        device: torch.device,
        stall_timeout: float,
        mesh: DeviceMesh | None = None,
        model_mesh: DeviceMesh | None = None,
    ) -> None:
        self.device, self.stall_timeout = device, stall_timeout
        self._patience = timedelta(seconds=stall_timeout)
        self.waits = Waits(device)
        self.rank, self.world, self.backend = 0, 1, "none"
        if dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self.backend = backend_for(dist.group.WORLD, device)
        self._alone = self.world == 1 or self.backend in LONELY_BACKENDS
        """No other rank answers."""
        everybody = self._new_groups([range(self.world)])
        name = "alone" if self._alone or everybody is None else everybody.group_name
        store = compat_groups.private_store() if self._alone else compat_groups.default_store()
        posts = Posts(BoundedStore(store), self.rank, self.world, name)
        self.watchdog = Watchdog(posts, self.rank, self.world, stall_timeout)
        watched: list[Lane] = []
        if not self._alone:
            weakref.finalize(self, Lookout(self.watchdog, watched, on_device=device.type == "cuda").stop)
        self._exchange = None if self._alone else self._new_exchange(name)
        ranks = Grid([[[0]]], [[0]])
        if self.world > 1:
            ranks = grid(mesh, model_mesh, None if self._alone else self.gather_objects)
        columns = [[rank for row in column for rank in row] for column in ranks.data]
        same_part = self._new_groups(columns) if len(columns) > 1 else None
        model = self._new_groups(ranks.model)
        rows = [row for column in ranks.data for row in column]
        gathers, reduces = self._new_groups(rows), self._new_groups(rows)
        replicas = self._new_groups([members for column in ranks.data for members in zip(*column, strict=True)])
        self.gathers = self._new_lane("gathers", gathers)
        self.reduces = self._new_lane("reduces", reduces)
        self.replicas = self._new_lane("between replicas", replicas)
        self.replicas.stream = self.reduces.stream  # an average over replicas follows a reduce anyway
        self.model = self._new_lane("model parallel", model, joint=False)  # recomputation may differ
        self._everybody = self._new_lane("all ranks", everybody)
        self._same_part = self._everybody
        if len(columns) > 1:
            self._same_part = self._new_lane("ranks with the same part of the model", same_part)
        self._everybody.stream = self._same_part.stream = self.gathers.stream
        if not self._alone:
            watched += {self.gathers, self.reduces, self.replicas, self.model, self._everybody, self._same_part}
        for lane in watched:
            lane.watched = lane.group is not None
        self.lanes = (self.gathers, self.reduces, self.replicas)
        """The lanes on which all ranks must do the same. Data-parallel ranks may differ in what they recompute."""
        self.shard_rank, self.shards = self.gathers.rank, self.gathers.world
        """Which shard is this rank's, and among how many ranks states are divided."""
        self.data_parallel = self.shards * self.replicas.world
        """Over how many ranks gradients are averaged."""
        self.data_rank = self.replicas.rank * self.shards + self.shard_rank
        """Which part of the data is this rank's. The ranks of one tensor-parallel group have the same part."""
        self.local_ranks = local_ranks(self.world)
        """How many ranks share this host: all, unless torchrun says otherwise."""
        self.device_ranks = self._count_device_ranks()
        """How many ranks share this rank's device, and so its memory. On CPUs these are the ranks of this host."""
        warn_of_gloo(self.backend, device, self.model.world)
        self.meeting = self._new_meeting()
        """Where the ranks that share states meet before a collective that perhaps not all of them make."""

    def _new_groups(self, rows: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Makes a group of every row: all ranks must make all groups. Returns this rank's group; None if alone."""
        mine = None
        for row in rows:
            if len(row) > 1:
                # NCCL's own watchdog would end the process and not say who was missing, so its limit stays long.
                limit = None if self.backend == "nccl" else self._patience
                with compat_groups.errors_left_to_caller():
                    group = dist.new_group(list(row), timeout=limit)
                mine = group if self.rank in row else mine
        return mine if isinstance(mine, dist.ProcessGroup) else None

    def _new_lane(self, name: str, group: dist.ProcessGroup | None, *, joint: bool = True) -> Lane:
        transport = transport_for(group, self.backend, self.device, self._patience, self.waits)
        return Lane(name, group, transport, self.device, self.watchdog, joint=joint)

    def _new_exchange(self, name: str) -> Exchange:
        address = machine.address_for_ranks()
        group = compat_groups.host_messages(
            f"zeroshard/exchange/{name}", self.rank, self.world, address, self._patience
        )
        return Exchange(group, self.rank, self.world, self.stall_timeout, self.watchdog)

    def _count_device_ranks(self) -> int:
        return device_ranks(
            self.device, self.local_ranks, (lambda mine: [mine]) if self._alone else self.gather_objects
        )

    def _new_meeting(self) -> Meeting:
        group = self.gathers.group
        if self._alone or group is None:
            return Meeting("", [self.rank], self.rank, self.watchdog)
        ranks = dist.get_process_group_ranks(group)
        return Meeting(f"zeroshard/meeting/{group.group_name}", ranks, self.rank, self.watchdog)

    def take_volume(self) -> RankVolume:
        """What this rank moved since the last call."""
        shards = {**self.gathers.meter.take(), **self.reduces.meter.take()}
        return RankVolume(shards, self.replicas.meter.take(), self.model.meter.take())

    def broadcast(self, tensor: Tensor, *, divided: bool = False) -> None:
        """Takes rank 0's values. ``divided``: the values of the first rank that has the same part of the model."""
        (self._same_part if divided else self._everybody).broadcast(tensor)

    def broadcast_together(self, tensors: Sequence[Tensor], *, divided: bool = False) -> None:
        """``broadcast`` of many tensors of any dtype. Small tensors share a message."""
        if (self._same_part if divided else self._everybody).group is None:
            return
        for parts in in_messages(tensors, MESSAGE_BYTES):
            message = pack(parts, self.device)
            self.broadcast(message, divided=divided)
            unpack(message, parts)

    def gather_objects(self, value: object, where: str = "an exchange of decisions") -> list[Any]:
        """Every rank's small Python value, in rank order. Blocks. ``where`` tells, in an error, what it was for."""
        if self._exchange is None:
            return [value] * self.world
        return self._exchange.gather(value, where)

    def from_rank_zero(self, value: object) -> Any:
        """Rank 0's Python value, on every rank. Blocks."""
        return value if self._exchange is None else self._exchange.from_first(value, "a decision of rank 0")

    def maximum(self, values: list[int], where: str = "the agreement on gradients") -> list[int]:
        """The element-wise maximum over all ranks. Blocks until all ranks have come, and does not wait for the device.

        ``where`` tells, in an error, what the ranks wanted to agree on. It is the same on all ranks up to a comma.
        """
        if self._exchange is None:
            return values
        began = self.waits.begin()
        found = self._exchange.maximum(values, where)
        self.waits.end(Cause.AGREEMENT, began)
        return found

    def sum_in_order(self, value: Tensor) -> Tensor:
        """The sum of a scalar over all shards, then over all parts of the model. The same bits on all ranks."""
        for lane in (self.gathers, self.model):
            if lane.group is not None:
                self.watchdog.note("gradient norm")
                value = lane.gather_small(value).sum()
        return value
