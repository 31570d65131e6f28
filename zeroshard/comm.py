"""Every collective, counted. Nothing else in the package talks to ``torch.distributed``.

A *lane* is an ordered sequence of collectives: one process group and, on CUDA, one stream. There are two, because
ranks may legitimately differ in when a gradient is ready and not in when a parameter is needed: **gathers** carries
parameters and agreements, **reduces** carries gradients. Within a lane all ranks issue the same operations in the
same order; a running hash of them is compared once a step (``Fabric.agree``).

Three transports carry a lane: nothing (a world of one), point-to-point messages (Gloo on CPU, whose own all-gather and
reduce-scatter allocate a whole extra buffer and take 2-3 times as long), or the backend's collectives.
"""

from __future__ import annotations

import os
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .observe.watchdog import Watchdog
from .parallel import grid

LOG_LENGTH = 4096
"""How many operations a lane remembers, to name the first one on which ranks differ."""

POLL_SECONDS = 0.0002


class Collective(Enum):
    """The operations that count as volume."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


class Traffic(NamedTuple):
    """What one kind of collective moved: elements of the flats, whatever the number of ranks; all-reduce twice."""

    elements: int = 0
    bytes: int = 0
    calls: int = 0


class DisagreementError(RuntimeError):
    """Ranks did different things. The message names the rank, the unit and the cause."""


class StallError(RuntimeError):
    """A collective did not complete. The message names the rank that is missing, and where it was last seen."""


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Makes what follows see the result: blocks the host on CPU, only the current stream on CUDA."""


class Done:
    """Nothing was to be done, or it is done."""

    def wait(self) -> None:
        pass


@dataclass
class _OnStream:
    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def wait_on_host(pending: Pending) -> None:
    """Blocks the host, for a caller that does not know which stream will use the memory next."""
    if isinstance(pending, _OnStream):
        pending.event.synchronize()
    else:
        pending.wait()


@dataclass
class _Messages:
    """Point-to-point messages, and what is to be done when they have arrived."""

    lane: Lane
    finish: Callable[[], None]
    done: bool = False

    def wait(self) -> None:
        if not self.done:
            self.done = True
            with self.lane.blaming_stalls():
                self.finish()


@dataclass
class Meter:
    """Counts traffic by collective."""

    counts: dict[str, Traffic] = field(default_factory=dict)

    def add(self, kind: Collective, tensor: Tensor) -> None:
        self.count(kind, tensor.numel(), tensor.element_size())

    def count(self, kind: Collective, numel: int, itemsize: int) -> None:
        old = self.counts.get(kind.value, Traffic())
        numel *= 2 if kind is Collective.ALL_REDUCE else 1
        self.counts[kind.value] = Traffic(old.elements + numel, old.bytes + numel * itemsize, old.calls + 1)

    def take(self) -> dict[str, Traffic]:
        counts, self.counts = self.counts, {}
        return counts


class Lane:
    """An ordered sequence of collectives among the ranks of one group."""

    def __init__(self, name: str, fabric: Fabric, group: dist.ProcessGroup | None, meter: Meter) -> None:
        self.name = name
        self.fabric = fabric
        self.group = group
        self.meter = meter
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self.stream = torch.cuda.Stream(fabric.device) if fabric.device.type == "cuda" else None
        self.hash = 0
        self.log: deque[str] = deque(maxlen=LOG_LENGTH)
        self._by_message = fabric.backend == "gloo" and fabric.device.type == "cpu"

    def all_gather(
        self, whole: Tensor, shard: Tensor, label: str, allocate: Callable[[], None] | None = None
    ) -> Pending:
        """Puts every rank's shard into ``whole``; ``shard`` may be this rank's slice of it.

        ``allocate`` gives ``whole`` its memory. It runs on the lane's stream, after the device's work so far, so that
        memory which that work released can be reused safely.
        """
        if self.group is None:  # nobody to gather from
            return self._on_stream(allocate or (lambda: None))
        self._note(Collective.ALL_GATHER, whole, label)
        if self._by_message:
            if allocate is not None:
                allocate()
            return self._exchange_shards(whole, shard, _tag("g", label))

        def run() -> None:
            if allocate is not None:
                allocate()
            _all_gather(whole, shard, self.group)

        return self._on_stream(run)

    def reduce_scatter(self, whole: Tensor, shard: Tensor, label: str) -> Pending:
        """Averages ``whole`` over the ranks; this rank's slice goes to ``shard``, which may be that very slice."""
        self._note(Collective.REDUCE_SCATTER, whole, label)
        if self._by_message:
            return self._exchange_and_average(whole, shard, _tag("r", label))

        def run() -> None:
            self._average_around(whole, shard, lambda op: _reduce_scatter(shard, whole, op, self.group))

        return self._on_stream(run)

    def all_reduce(self, whole: Tensor, label: str) -> Pending:
        """Averages ``whole`` over the ranks, in place."""
        self._note(Collective.ALL_REDUCE, whole, label)
        if self._by_message:
            # The same two exchanges as reduce-scatter and all-gather, so that every stage adds in the same order.
            mine = whole.tensor_split(self.world)[self.rank]
            reduced = self._exchange_and_average(whole, mine, _tag("r", label))

            def finish() -> None:
                reduced.wait()
                self._exchange_shards(whole, mine, _tag("g", label)).wait()

            return _Messages(self, finish)

        def run() -> None:
            self._average_around(whole, whole, lambda op: dist.all_reduce(whole, op, group=self.group))

        return self._on_stream(run)

    def run(self, work: Callable[[], object]) -> Pending:
        """Does something else on the lane's stream, after the device's work so far: a copy to or from the host."""
        return self._on_stream(work)

    @contextmanager
    def blaming_stalls(self) -> Iterator[None]:
        """Turns a backend's time-out or lost connection into an error that names the rank and the unit."""
        try:
            yield
        except RuntimeError as error:
            if not _is_of_the_backend(error):
                raise
            last = self.log[-1] if self.log else "the first collective"
            raise StallError(f"{self.fabric.explain_stall(last)} (the backend said: {error})") from error

    def _note(self, kind: Collective, whole: Tensor, label: str) -> None:
        entry = f"{kind.value} {label}"
        self.hash = zlib.crc32(entry.encode(), self.hash)
        self.log.append(entry)
        self.fabric.progress(f"{entry} ({self.name})")
        if self.group is not None:
            self.meter.add(kind, whole)

    def _on_stream(self, run: Callable[[], object]) -> Pending:
        if self.stream is None:
            with self.blaming_stalls():
                run()
            return Done()
        # The lane starts after what the device was given so far: inputs are then written, and memory that a release
        # gave back is no longer read. What comes after on the device runs beside it.
        self.stream.wait_stream(torch.cuda.current_stream(self.fabric.device))
        with torch.cuda.stream(self.stream), self.blaming_stalls():
            run()
        event = torch.cuda.Event()
        event.record(self.stream)
        return _OnStream(event)

    def _average_around(
        self, inputs: Tensor, outputs: Tensor, reduce: Callable[[dist.ReduceOp.RedOpType], Any]
    ) -> None:
        if self.fabric.backend == "nccl":
            reduce(dist.ReduceOp.AVG)
            return
        # Dividing first keeps fp16 sums from overflowing; for the others once, afterwards, is a smaller pass.
        first = inputs.dtype is torch.float16
        if first:
            inputs.div_(self.world)
        reduce(dist.ReduceOp.SUM)
        if not first:
            outputs.div_(self.world)

    def _exchange_shards(self, whole: Tensor, shard: Tensor, tag: int) -> Pending:
        slices = whole.tensor_split(self.world)
        own = slices[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        with self.blaming_stalls():
            works = [self._receive(slices[peer], peer, tag) for peer in self._peers()]
            works += [self._send(own, peer, tag) for peer in self._peers()]
        return _Messages(self, lambda: self._complete(works))

    def _exchange_and_average(self, whole: Tensor, shard: Tensor, tag: int) -> Pending:
        world, rank = self.world, self.rank
        if whole.dtype is torch.float16:
            whole.div_(world)
        slices = whole.tensor_split(world)
        peers = self._peers()
        # One slice is in flight to this rank at a time: the extra memory is a shard, not a flat.
        arrived = torch.empty_like(slices[rank])
        with self.blaming_stalls():
            sends = [self._send(slices[peer], peer, tag) for peer in peers]
            first = self._receive(arrived, peers[0], tag)

        def finish() -> None:
            self._complete([first])
            torch.add(slices[rank], arrived, out=shard)
            for peer in peers[1:]:
                self._complete([self._receive(arrived, peer, tag)])
                shard.add_(arrived)
            if whole.dtype is not torch.float16:
                shard.div_(world)
            self._complete(sends)

        return _Messages(self, finish)

    def _peers(self) -> list[int]:
        """The other ranks, each rank starting with another one."""
        return [(self.rank - step) % self.world for step in range(1, self.world)]

    def _send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        return _work(dist.isend(tensor, group=self.group, group_dst=peer, tag=tag))

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        return _work(dist.irecv(tensor, group=self.group, group_src=peer, tag=tag))

    def _complete(self, works: list[dist.Work]) -> None:
        for work in works:
            work.wait(self.fabric.patience)


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
            self.backend = _backend_for(dist.group.WORLD, device)
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

    def maximum(self, values: list[int]) -> list[int]:
        """The element-wise maximum over all ranks, on the host. Blocks, but does not wait for the device's work."""
        if self.group is None or self.backend == "fake":
            return values
        self.progress("agreement on gradients")
        host = torch.tensor(values, dtype=torch.int64)
        if self._side is None:
            with self.gathers.blaming_stalls():
                work = _work(dist.all_reduce(host, dist.ReduceOp.MAX, group=self.group, async_op=True))
                work.wait(self.patience)
            return [int(value) for value in host.tolist()]
        if self.gathers.stream is not None:
            self._side.wait_stream(self.gathers.stream)  # one order of operations in a group
        with torch.cuda.stream(self._side):
            on_device = host.pin_memory().to(self.device, non_blocking=True)
            dist.all_reduce(on_device, dist.ReduceOp.MAX, group=self.group)
            agreed = torch.empty_like(host, pin_memory=True)
            agreed.copy_(on_device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._side)
        self._wait_on_host(event)
        return [int(value) for value in agreed.tolist()]

    def sum_in_order(self, value: Tensor) -> Tensor:
        """The sum of all shards' scalars, then of all parts of the model, on the device: the same bits on all ranks."""
        for lane in (self.gathers, self.model):
            if lane.group is not None:
                gathered = torch.empty(lane.world, dtype=value.dtype, device=value.device)
                self.progress("gradient norm")
                with lane.blaming_stalls():
                    _all_gather(gathered, value.reshape(1), lane.group)
                value = gathered.sum()
        return value

    def gather_along_model(self, value: Tensor) -> Tensor:
        """The small tensors of all model-parallel ranks, one row each."""
        gathered = torch.empty(self.model.world, *value.shape, dtype=value.dtype, device=value.device)
        with self.model.blaming_stalls():
            _all_gather(gathered, value[None], self.model.group)
        return gathered

    def _wait_on_host(self, event: torch.cuda.Event) -> None:
        deadline = time.monotonic() + self.stall_timeout
        while not event.query():
            if time.monotonic() > deadline:
                raise StallError(self.explain_stall("the agreement on gradients"))
            time.sleep(POLL_SECONDS)


def start_process_group(device: torch.device) -> None:
    """Starts one with the device's backend, if there is none yet and torchrun's environment says who we are."""
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        backend, index = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        store = _store_of_restart()
        if store is None:
            dist.init_process_group(backend, device_id=index)
        else:
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, device_id=index)


def _store_of_restart() -> Any:
    """Names of its own for every restart under torchrun; None where that is not needed, or cannot be told.

    torchrun's agent keeps one store over restarts, in which torch looks up addresses by names that are always the same:
    ranks that are started anew would find those of the dead. On one node, all ranks know which restart it is.
    """
    known = os.environ.get
    restart, local, world = known("TORCHELASTIC_RESTART_COUNT", "0"), known("LOCAL_WORLD_SIZE"), known("WORLD_SIZE")
    if restart == "0" or local != world or known("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    stores: Any = dist  # whose annotations do not list them
    store = stores.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return stores.PrefixStore(f"restart {restart}", store)


def end_process_group() -> None:
    """Ends it, if there is one, when all ranks have come."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _backend_for(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """The backend that serves tensors of this device: a group may have one for each, written "cpu:gloo,cuda:nccl"."""
    config = str(dist.get_backend_config(group))
    for part in config.split(","):
        kind, _, backend = part.rpartition(":")
        if kind in ("", device.type):
            return backend
    raise ValueError(
        f"the process group serves {config}, not tensors on {device.type}; initialise it with a backend for that device"
    )


def _is_of_the_backend(error: RuntimeError) -> bool:
    """Whether a collective failed, rather than something around it; Gloo raises plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in ("gloo", "timed out"))


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work


def _tag(kind: str, label: str) -> int:
    """Messages of different units never match, so ranks out of order stall and are named rather than swap data."""
    return zlib.crc32(f"{kind}:{label}".encode()) & 0x7FFFFFFF


def _all_gather(whole: Tensor, shard: Tensor, group: dist.ProcessGroup | None) -> None:
    # torch 2.13 renamed both and warns on the old names; 2.11 has only those.
    if hasattr(dist, "all_gather_single"):
        dist.all_gather_single(whole, shard, group=group)
    else:
        dist.all_gather_into_tensor(whole, shard, group=group)


def _reduce_scatter(shard: Tensor, whole: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if hasattr(dist, "reduce_scatter_single"):
        dist.reduce_scatter_single(shard, whole, op, group=group)
    else:
        dist.reduce_scatter_tensor(shard, whole, op, group=group)
