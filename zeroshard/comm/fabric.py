"""The ranks that share a model, and every collective between them, counted.

There are two *lanes* (``lane.py``) for model states, because ranks may legitimately differ in when a gradient is ready
and not in when a parameter is needed: **gathers** carries parameters and agreements, **reduces** carries gradients.
Nothing outside these two files talks to ``torch.distributed`` about a model's states.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..config.bounds import MESSAGE_BYTES
from .lane import Lane, StallError, all_gather, work_of
from .messages import in_messages, pack, unpack
from .parallel import grid
from .process_group import backend_for, warn_of_gloo
from .traffic import Meter
from .watchdog import Watchdog

POLL_SECONDS = 0.0002
FAILURE_SECONDS = 1.0
"""How often a rank that waits looks whether another has left word of what went wrong there."""


class DisagreementError(RuntimeError):
    """Ranks did different things. The message names the rank, the unit and the cause."""


class Fabric:
    """The ranks that share a model: who they are, the lanes between them, and what they must agree on.

    With a two-dimensional mesh, states are divided among the ranks of a row, and rows are replicas of each other:
    gathers and reduces stay inside a row, and the shards of averaged gradients are averaged once more between rows.

    With tensor parallelism each of its ranks has rows of its own. Nothing of a model's states passes between these;
    only decisions do, and activations.
    """

    def __init__(
        self,
        device: torch.device,
        stall_timeout: float,
        mesh: DeviceMesh | None = None,
        model_mesh: DeviceMesh | None = None,
    ) -> None:
        self.device = device
        self.stall_timeout = stall_timeout
        self.patience = timedelta(seconds=stall_timeout)
        self.meter, self.meter_between, self.meter_model = Meter(), Meter(), Meter()
        self.rank, self.world, self.backend = 0, 1, "none"
        self._watchdog: Watchdog | None = None
        self.group = self.data_group = gathers = reduces = between = model = None
        if dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self.backend = backend_for(dist.group.WORLD, device)
        if self.world > 1:
            self.group = self.data_group = self._new_groups([range(self.world)])
            ranks = grid(mesh, model_mesh, None if self.backend == "fake" else self._gather_first)
            rows = [row for column in ranks.data for row in column]
            if len(ranks.data) > 1:
                self.data_group = self._new_groups([[rank for row in column for rank in row] for column in ranks.data])
                model = self._new_groups(ranks.model)
            gathers, reduces = self._new_groups(rows), self._new_groups(rows)
            between = self._new_groups([members for column in ranks.data for members in zip(*column, strict=True)])
            if self.group is not None and self.backend != "fake":
                self._watchdog = Watchdog.start(self.rank, self.world, self.group.group_name)
                weakref.finalize(self, self._watchdog.stop)
        self.gathers = Lane("gathers", self, gathers, self.meter)
        self.reduces = Lane("reduces", self, reduces, self.meter)
        self.between = Lane("between replicas", self, between, self.meter_between)
        self.model = Lane("model parallel", self, model, self.meter_model)
        warn_of_gloo(self.backend, device, self.model.world)
        if self.reduces.stream is not None:
            self.between.stream = self.reduces.stream  # one after the other anyway
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _gather_first(self, value: object) -> list[Any]:
        """Every rank's small value, before there are lanes."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    @property
    def shard_rank(self) -> int:
        """Which shard is this rank's."""
        return self.gathers.rank

    @property
    def shards(self) -> int:
        """Among how many ranks states are divided."""
        return self.gathers.world

    @property
    def data_rank(self) -> int:
        """Which part of the data is this rank's; ranks of one group of tensor parallelism have the same."""
        return self.between.rank * self.gathers.world + self.gathers.rank

    @property
    def local_ranks(self) -> int:
        """Ranks that share this host: all, unless torchrun says otherwise."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world))

    @property
    def data_parallel(self) -> int:
        """Over how many ranks gradients are averaged."""
        return self.gathers.world * self.between.world

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Those on which all ranks must do the same. Data-parallel ranks may differ in what they recompute."""
        return (self.gathers, self.reduces, self.between)

    def _new_groups(self, rows: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Makes a group of every row, as all ranks must; returns this rank's, or None if it is alone in it."""
        mine = None
        for row in rows:
            if len(row) > 1:
                group = self._new_group(list(row))
                mine = group if self.rank in row else mine
        return mine

    def _new_group(self, ranks: list[int]) -> dist.ProcessGroup | None:
        # NCCL's own watchdog would abort the process without a word on who was missing, so its limit stays long.
        limit = None if self.backend == "nccl" else self.patience
        created = dist.new_group(ranks, timeout=limit)
        return created if isinstance(created, dist.ProcessGroup) else None

    def progress(self, where: str) -> None:
        if self._watchdog is not None:
            self._watchdog.note(where)

    @property
    def tell_failure(self) -> Callable[[str], None] | None:
        """Leaves word for the other ranks of what went wrong on this one; None where there are none."""
        return None if self._watchdog is None else self._watchdog.fail

    def explain_stall(self, where: str) -> str:
        if self._watchdog is None:
            return f"rank {self.rank} could not complete {where}"
        return self._watchdog.explain(where, self.stall_timeout)

    def broadcast(self, tensor: Tensor, *, divided: bool = False) -> None:
        """Takes rank 0's values; of what tensor parallelism divides, those of the first rank that has the same part."""
        group = self.data_group if divided else self.group
        if group is not None:
            with self.gathers.blaming_stalls():
                dist.broadcast(tensor, group=group, group_src=0)

    def broadcast_together(self, tensors: Sequence[Tensor], *, divided: bool = False) -> None:
        """``broadcast`` of many tensors of any dtype, in one message if they are small."""
        if (self.data_group if divided else self.group) is None:
            return
        for parts in in_messages(tensors, MESSAGE_BYTES):
            message = pack(parts, self.device)
            self.broadcast(message, divided=divided)
            unpack(message, parts)

    def gather_objects(self, value: object) -> list[Any]:
        """Every rank's small Python value, in rank order. Blocks."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world
        if self.backend == "fake":
            return [value] * self.world
        with self.gathers.blaming_stalls():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def from_rank_zero(self, value: object) -> Any:
        """Rank 0's Python value, on every rank. Blocks."""
        if self.group is None or self.backend == "fake":
            return value
        values = [value]
        with self.gathers.blaming_stalls():
            dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def maximum(self, values: list[int], where: str = "the agreement on gradients") -> list[int]:
        """The element-wise maximum over all ranks, on the host. Blocks, but does not wait for the device's work.

        ``where`` tells in an error what the ranks were about to agree on.
        """
        if self.group is None or self.backend == "fake":
            return values
        self.progress(where)
        host = torch.tensor(values, dtype=torch.int64)
        if self._side is None:
            with self.gathers.blaming_stalls():
                work = work_of(dist.all_reduce(host, dist.ReduceOp.MAX, group=self.group, async_op=True))
                work.wait(self.patience)
            return [int(value) for value in host.tolist()]
        if self.gathers.stream is not None:
            self._side.wait_stream(self.gathers.stream)  # one order of operations in a group
        with torch.cuda.stream(self._side), self.gathers.blaming_stalls():
            on_device = host.pin_memory().to(self.device, non_blocking=True)
            dist.all_reduce(on_device, dist.ReduceOp.MAX, group=self.group)
            agreed = torch.empty_like(host, pin_memory=True)
            agreed.copy_(on_device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._side)
        self._wait_on_host(event, where)
        return [int(value) for value in agreed.tolist()]

    def sum_in_order(self, value: Tensor) -> Tensor:
        """The sum of all shards' scalars, then of all parts of the model, on the device: the same bits on all ranks."""
        for lane in (self.gathers, self.model):
            if lane.group is not None:
                gathered = torch.empty(lane.world, dtype=value.dtype, device=value.device)
                self.progress("gradient norm")
                with lane.blaming_stalls():
                    all_gather(gathered, value.reshape(1), lane.group)
                value = gathered.sum()
        return value

    def gather_along_model(self, value: Tensor) -> Tensor:
        """The small tensors of all model-parallel ranks, one row each."""
        gathered = torch.empty(self.model.world, *value.shape, dtype=value.dtype, device=value.device)
        with self.model.blaming_stalls():
            all_gather(gathered, value[None], self.model.group)
        return gathered

    def _wait_on_host(self, event: torch.cuda.Event, where: str) -> None:
        deadline = time.monotonic() + self.stall_timeout
        look = time.monotonic() + FAILURE_SECONDS
        while not event.query():
            now = time.monotonic()
            if now > look and self._watchdog is not None:
                look = now + FAILURE_SECONDS
                deadline = now if self._watchdog.failure() is not None else deadline
            if now >= deadline:
                stall = self.explain_stall(where)
                self.gathers.break_off(stall)
                raise StallError(stall)
            time.sleep(POLL_SECONDS)
