"""Runs one rank of N alone: true shapes, true schedule, true allocations, and no other ranks.

With a GPU the memory is real, and torch's allocator measures it. Without a GPU, tensors have shapes and no values, and
the storages that are alive are counted. Both ways run the real runtime.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..api import shard, stats
from ..comm.traffic import Traffic
from ..config.offload import Offload
from ..config.options import AUTO, Config
from ..observe.ledger import Memory
from ..offload.place import room_for_states
from ..runtime import Runtime, runtime_of
from ..states.flat import Flat
from ..system import compat, compat_groups

STEPS = 3
"""Steps before the peak is read. The first two learn the order of units and make the optimizer's states. One more step,
after these, reads the peak by kind."""
DELAYED_AFTER = 1
"""The largest ``delayed_update_after`` of a dry run, so that the delay has begun when memory is read."""
AT_PEAK = 0.999
"""Memory is read by kind as soon as this share of the peak is alive."""


@dataclass(frozen=True)
class DryRun:
    """The memory that one rank used, and what the rank would have sent."""

    parameters: int
    """Ψ."""
    at_step: Memory
    """Model states between backward and update, as the papers count them."""
    host: Memory | None
    """Model states in host memory, with offload."""
    host_traffic: Mapping[str, int]
    """Bytes of model states that crossed between host and device in a step, with offload."""
    checkpoint_traffic: Mapping[str, int]
    """Bytes of checkpoints that crossed between host and device in a step, with ``Activations(offload=True)``."""
    peak: int
    """The maximum of bytes alive in the last step, activations included."""
    at_peak: Memory
    """The bytes of the peak whose kind is known. The rest is activations and temporaries of operations."""
    at_rest: int
    """Bytes alive after the last step."""
    volume: Mapping[str, Traffic]
    volume_model: Mapping[str, Traffic]
    """Between model-parallel ranks: what gathering divided checkpoints (P_a) would have sent."""
    kept: int
    """Ψ_kept: elements of the units that stayed gathered from forward to backward (stage 3)."""
    real: bool
    """True if the memory was a real device's."""
    offload: Offload | None = None
    """The offload of this run: as asked, with ``DELAYED_AFTER`` and the ``device_memory`` that "auto" found."""

    @property
    def volume_elements(self) -> int:
        return sum(traffic.elements for traffic in self.volume.values())

    @property
    def volume_model_elements(self) -> int:
        return sum(traffic.elements for traffic in self.volume_model.values())


def dry_run(
    build: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Callable[[nn.Module], Tensor],
    *,
    world: int,
    rank: int = 0,
    real: bool | None = None,
    tensor_parallel: int = 1,
    parallelise: Callable[[Any, DeviceMesh], object] | None = None,
    **options: Any,
) -> DryRun:
    """Runs rank ``rank`` of ``world`` for a few steps.

    ``loss`` makes the inputs and runs one forward pass. ``real`` says whether to use the GPU; the default is to use a
    GPU if there is one. ``tensor_parallel`` is the number of neighbouring ranks that share a replica; ``parallelise``
    divides the model over a mesh of these ranks.
    """
    real = torch.cuda.is_available() if real is None else real
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank} does not exist in a world of {world}")
    if world % tensor_parallel:
        raise ValueError(f"tensor parallelism of {tensor_parallel} does not divide a world of {world}")
    config = Config.parse(options)
    if config.chooses_offload:
        raise ValueError('offload="auto" is chosen where a job starts; name one to run it dry')
    if config.activations is not None and config.activations.recompute == AUTO:
        raise ValueError(
            'recompute="auto" is decided where a job runs; give a share to run it dry: see `zeroshard plan`'
        )
    offload = _as_run(config.offload, world, real)
    options["offload"] = offload
    with compat_groups.one_rank_of(world, rank):
        if parallelise is not None and tensor_parallel > 1:
            device = "cuda" if real else "cpu"
            names = ("data", "model")
            mesh = init_device_mesh(device, (world // tensor_parallel, tensor_parallel), mesh_dim_names=names)["model"]
            build = partial(_built_in_parts, build, parallelise, mesh)
        if real:
            return replace(_on_device(build, optimizer, loss, options), offload=offload)
        with compat.without_values():
            return replace(_without_values(build, optimizer, loss, options), offload=offload)


def _as_run(offload: Offload | None, world: int, real: bool) -> Offload | None:
    """The offload to run with: after a few steps it behaves as after many, and the plan can compute its memory."""
    if offload is None:
        return None
    if offload.delayed_update_after is not None:
        offload = replace(offload, delayed_update_after=min(offload.delayed_update_after, DELAYED_AFTER))
    if offload.host_fraction == "auto" and offload.device_memory is None:
        device = torch.device("cuda" if real else "cpu")
        offload = replace(offload, device_memory=room_for_states(device, 1 if real else world))
    return offload


def _built_in_parts(
    build: Callable[[], nn.Module], parallelise: Callable[[Any, DeviceMesh], object], mesh: DeviceMesh
) -> nn.Module:
    model = build()
    parallelise(model, mesh)
    return model


def _on_device(
    build: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Callable[[nn.Module], Tensor],
    options: Mapping[str, Any],
) -> DryRun:
    gc.collect()  # an earlier model refers to itself; its memory would count, or be freed during the run
    before = torch.cuda.memory_allocated()
    with torch.device("meta"):
        model = build()
    model, stepper = shard(model, optimizer(model), init="empty", **options)
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        _train(model, stepper, loss)
        torch.cuda.synchronize()
    peak, rest = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    with _PeakWatch(runtime_of(model), lambda: torch.cuda.memory_allocated() - before, peak) as seen:
        _train(model, stepper, loss)
    return _report(model, peak, rest, seen.memory, real=True)


def _without_values(
    build: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Callable[[nn.Module], Tensor],
    options: Mapping[str, Any],
) -> DryRun:
    with _LiveStorages() as live:
        model = build()
        model, stepper = shard(model, optimizer(model), **{**options, "device": "cpu", "defragment": False})
        runtime = runtime_of(model)
        sharded = [flat for unit in runtime.units for flat in unit.flats if flat.sharded]
        pipeline = runtime.pipeline
        live.watch(sharded, lambda: (runtime.fabric.gathers.hash, 0 if pipeline is None else pipeline.copies))
        if pipeline is not None:
            live.ignore([block.memory for block in pipeline.blocks])
        checkpoints = runtime.checkpoints
        for _ in range(STEPS):
            live.peak = 0
            _train(model, stepper, loss)
            if checkpoints is not None and checkpoints.store.host is not None:
                live.ignore([slot.memory for slot in checkpoints.store.host.slots])
        peak, rest = live.peak, live.now()
        with _PeakWatch(runtime, live.now, peak) as seen:
            _train(model, stepper, loss)
        return _report(model, peak, rest, seen.memory, real=False)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[nn.Module], Tensor]) -> None:
    loss(model).backward()
    host = runtime_of(model).host
    if host is not None:  # otherwise gradients on their way to the host would count for the device
        host.wait()
    optimizer.step()
    optimizer.zero_grad()


def _report(model: nn.Module, peak: int, at_rest: int, at_peak: Memory, *, real: bool) -> DryRun:
    seen = stats(model)
    assert seen.memory_at_step is not None
    return DryRun(
        parameters=seen.parameters,
        at_step=seen.memory_at_step,
        host=seen.host_memory,
        host_traffic=seen.host_traffic,
        checkpoint_traffic=seen.checkpoint_traffic,
        peak=peak,
        at_peak=at_peak,
        at_rest=at_rest,
        volume=seen.volume,
        volume_model=seen.volume_model,
        kept=seen.kept_parameters,
        real=real,
    )


class _PeakWatch(compat.OperationWatch):
    """Reads the memory by kind when it first comes close to a known peak."""

    def __init__(self, runtime: Runtime, now: Callable[[], int], peak: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runtime, self._now, self._enough = runtime, now, AT_PEAK * peak
        self.memory = Memory()

    def see(self, tensors: list[Tensor]) -> None:
        if not self.memory.total and self._now() >= self._enough:
            self.memory = self._runtime.ledger.now()


class _LiveStorages(compat.OperationWatch):
    """Counts the bytes of all storages that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {}
        self._total = 0
        self._flats: dict[int, Flat] = {}
        self._ignored: set[int] = set()
        self._present: list[Flat] = []
        self._gathers: Callable[[], object] = int
        self._seen_gathers: object = 0
        self.peak = 0

    def watch(self, flats: list[Flat], gathers: Callable[[], object]) -> None:
        """Watches flats whose storage is emptied and filled again, because no operation shows that.

        There may be thousands of flats. All are looked at only if ``gathers()`` has changed; else none was filled.
        """
        self._flats = {compat.storage_key(flat.whole): flat for flat in flats}
        self._gathers = gathers
        for key in self._flats:
            self._forget(key)

    def ignore(self, tensors: list[Tensor]) -> None:
        """Leaves out tensors in host memory."""
        for tensor in tensors:
            self._ignored.add(compat.storage_key(tensor))
            self._forget(compat.storage_key(tensor))

    def now(self) -> int:
        """Bytes alive."""
        gathers = self._gathers()
        if gathers != self._seen_gathers:
            self._seen_gathers, self._present = gathers, list(self._flats.values())
        sizes = [(flat, flat.whole.untyped_storage().nbytes()) for flat in self._present]
        self._present = [flat for flat, size in sizes if size]
        return self._total + sum(size for _, size in sizes)

    def see(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self._note(tensor)
        self.peak = max(self.peak, self.now())

    def _note(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), compat.storage_key(tensor)
        if key not in self._sizes and key not in self._flats and key not in self._ignored:
            self._sizes[key] = storage.nbytes()
            self._total += storage.nbytes()
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._total -= self._sizes.pop(key, 0)
