"""The ranks that share a model, and every collective between them.

Model states travel on two *lanes* (``lane``): **gathers** carries parameters and agreements, **reduces** carries
gradients. There are two because all ranks need parameters in the same order, but gradients may be ready in a different
order on each rank. Only this room talks to ``torch.distributed`` about model states.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..config.bounds import MESSAGE_BYTES
from ..system import compat
from .grid import Grid, grid
from .lane import Lane, StallError
from .meeting import Meeting
from .messages import in_messages, pack, unpack
from .process_group import backend_for, warn_of_gloo
from .traffic import RankVolume
from .transport import transport_for, work_of
from .watchdog import Watchdog

POLL_SECONDS = 0.0002
FAILURE_SECONDS = 1.0
"""How often a waiting rank asks whether another rank has failed."""


class DisagreementError(RuntimeError):
    """Ranks did different things. The message names the rank, the unit and the cause."""


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
        self.rank, self.world, self.backend = 0, 1, "none"
        if dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self.backend = backend_for(dist.group.WORLD, device)
        self._alone = self.world == 1 or self.backend == "fake"
        """No other rank answers."""
        self.group = self.data_group = self._new_groups([range(self.world)])
        ranks = Grid([[[0]]], [[0]])
        if self.world > 1:
            ranks = grid(mesh, model_mesh, None if self._alone else self._gather_first)
        if len(ranks.data) > 1:
            self.data_group = self._new_groups([[rank for row in column for rank in row] for column in ranks.data])
        model = self._new_groups(ranks.model)
        rows = [row for column in ranks.data for row in column]
        gathers, reduces = self._new_groups(rows), self._new_groups(rows)
        replicas = self._new_groups([members for column in ranks.data for members in zip(*column, strict=True)])
        if self._alone or self.group is None:
            self.watchdog = Watchdog.silent(self.rank, self.world)
        else:
            self.watchdog = Watchdog.start(self.rank, self.world, self.group.group_name, stall_timeout)
            weakref.finalize(self, self.watchdog.stop)
        self.gathers = self._new_lane("gathers", gathers)
        self.reduces = self._new_lane("reduces", reduces)
        self.replicas = self._new_lane("between replicas", replicas)
        self.replicas.stream = self.reduces.stream  # an average over replicas follows a reduce anyway
        self.model = self._new_lane("model parallel", model)
        self.lanes = (self.gathers, self.reduces, self.replicas)
        """The lanes on which all ranks must do the same. Data-parallel ranks may differ in what they recompute."""
        self.shard_rank, self.shards = self.gathers.rank, self.gathers.world
        """Which shard is this rank's, and among how many ranks states are divided."""
        self.data_parallel = self.shards * self.replicas.world
        """Over how many ranks gradients are averaged."""
        self.data_rank = self.replicas.rank * self.shards + self.shard_rank
        """Which part of the data is this rank's. The ranks of one tensor-parallel group have the same part."""
        self.local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        """How many ranks share this host: all, unless torchrun says otherwise."""
        warn_of_gloo(self.backend, device, self.model.world)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.meeting = self._new_meeting()
        """Where the ranks that share states meet before a collective that perhaps not all of them make."""

    def _new_groups(self, rows: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Makes a group of every row: all ranks must make all groups. Returns this rank's group; None if alone."""
        mine = None
        for row in rows:
            if len(row) > 1:
                # NCCL's own watchdog would abort the process and not say who was missing, so its limit stays long.
                limit = None if self.backend == "nccl" else self._patience
                group = dist.new_group(list(row), timeout=limit)
                mine = group if self.rank in row else mine
        return mine if isinstance(mine, dist.ProcessGroup) else None

    def _new_lane(self, name: str, group: dist.ProcessGroup | None) -> Lane:
        transport = transport_for(group, self.backend, self.device, self._patience)
        return Lane(name, group, transport, self.device, self.watchdog)

    def _new_meeting(self) -> Meeting:
        group = self.gathers.group
        if self._alone or group is None:
            return Meeting(None, "", [self.rank], self.rank, self.watchdog)
        name, ranks = f"zeroshard/meeting/{group.group_name}", dist.get_process_group_ranks(group)
        return Meeting(compat.default_store(), name, ranks, self.rank, self.watchdog)

    def take_volume(self) -> RankVolume:
        """What this rank moved since the last call."""
        shards = {**self.gathers.meter.take(), **self.reduces.meter.take()}
        return RankVolume(shards, self.replicas.meter.take(), self.model.meter.take())

    def broadcast(self, tensor: Tensor, *, divided: bool = False) -> None:
        """Takes rank 0's values. ``divided``: the values of the first rank that has the same part of the model."""
        group = self.data_group if divided else self.group
        if group is not None:
            with self.gathers.blaming_stalls("a broadcast"):
                dist.broadcast(tensor, group=group, group_src=0)

    def broadcast_together(self, tensors: Sequence[Tensor], *, divided: bool = False) -> None:
        """``broadcast`` of many tensors of any dtype. Small tensors share a message."""
        if (self.data_group if divided else self.group) is None:
            return
        for parts in in_messages(tensors, MESSAGE_BYTES):
            message = pack(parts, self.device)
            self.broadcast(message, divided=divided)
            unpack(message, parts)

    def gather_objects(self, value: object) -> list[Any]:
        """Every rank's small Python value, in rank order. Blocks."""
        if self._alone:
            return [value] * self.world
        with self.gathers.blaming_stalls("an exchange of decisions"):
            return self._gather_first(value)

    def _gather_first(self, value: object) -> list[Any]:
        """``gather_objects`` before there are lanes."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_rank_zero(self, value: object) -> Any:
        """Rank 0's Python value, on every rank. Blocks."""
        if self._alone:
            return value
        values = [value]
        with self.gathers.blaming_stalls("a decision of rank 0"):
            dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def maximum(self, values: list[int], where: str = "the agreement on gradients") -> list[int]:
        """The element-wise maximum over all ranks, on the host. Blocks, but does not wait for the device's work.

        ``where`` tells, in an error, what the ranks wanted to agree on.
        """
        if self._alone:
            return values
        self.watchdog.note(where)
        host = torch.tensor(values, dtype=torch.int64, device="cpu")
        if self._side is None:
            with self.gathers.blaming_stalls(where):
                work = work_of(dist.all_reduce(host, dist.ReduceOp.MAX, group=self.group, async_op=True))
                work.wait(self._patience)
            return [int(value) for value in host.tolist()]
        if self.gathers.stream is not None:
            self._side.wait_stream(self.gathers.stream)  # the operations of a group must have one order
        with torch.cuda.stream(self._side), self.gathers.blaming_stalls(where):
            on_device = host.pin_memory().to(self.device, non_blocking=True)
            dist.all_reduce(on_device, dist.ReduceOp.MAX, group=self.group)
            agreed = torch.empty_like(host, pin_memory=True)
            agreed.copy_(on_device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._side)
        self._wait_on_host(event, where)
        return [int(value) for value in agreed.tolist()]

    def _wait_on_host(self, event: torch.cuda.Event, where: str) -> None:
        deadline = time.monotonic() + self.stall_timeout
        look = time.monotonic() + FAILURE_SECONDS
        while not event.query():
            now = time.monotonic()
            if now > look:
                look = now + FAILURE_SECONDS
                deadline = now if self.watchdog.failure() is not None else deadline
            if now >= deadline:
                stall = self.watchdog.explain(where)
                self.gathers.break_off(stall)
                raise StallError(stall)
            time.sleep(POLL_SECONDS)

    def sum_in_order(self, value: Tensor) -> Tensor:
        """The sum of a scalar over all shards, then over all parts of the model. The same bits on all ranks."""
        for lane in (self.gathers, self.model):
            if lane.group is not None:
                self.watchdog.note("gradient norm")
                value = lane.gather_small(value).sum()
        return value
