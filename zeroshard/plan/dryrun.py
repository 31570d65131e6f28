"""One rank of N, run for real: true shapes, true schedule, true allocations, and nobody to talk to.

With a GPU its memory is real, and torch's allocator is what measures it. Without one, tensors have shapes and no
values, and what is measured is the storages that are alive: the same runtime either way, not a model of it.
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
from ..config.options import AUTO
from ..observe.ledger import Memory
from ..offload.place import room_for_states
from ..runtime import Runtime, runtime_of
from ..states.flat import Flat
from ..system import compat

STEPS = 3
"""The first two steps learn the order of units and make the optimizer's states; one more looks at the peak by kind."""
DELAYED_AFTER = 1
"""Steps after which an update that is to be delayed is, at most: it is under way when the last one is looked at."""
AT_PEAK = 0.999
"""Memory is looked at by kind when this much of the peak is alive."""


@dataclass(frozen=True)
class DryRun:
    """What one rank held and would have sent."""

    parameters: int
    """Ψ."""
    at_step: Memory
    """Model states between backward and update, as the papers count them."""
    host: Memory | None
    """With offload: model states in host memory."""
    host_traffic: Mapping[str, int]
    """With offload: bytes of model states that crossed between host and device in a step."""
    checkpoint_traffic: Mapping[str, int]
    """With ``Activations(offload=True)``: bytes of checkpoints that did."""
    peak: int
    """Bytes alive at once at most in the last step, activations included."""
    at_peak: Memory
    """What of that was known by kind; the rest is activations and what an operation needs beside them."""
    at_rest: int
    """Bytes alive when it ended."""
    volume: Mapping[str, Traffic]
    volume_model: Mapping[str, Traffic]
    """Between model-parallel ranks: what divided checkpoints (P_a) would have cost."""
    kept: int
    """Elements that stage 3 held from forward to backward."""
    real: bool
    """Whether the memory was a device's."""
    offload: Offload | None = None
    """What it ran with: as asked, but for ``DELAYED_AFTER``, and with the ``device_memory`` that "auto" found."""

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

    ``loss`` is one forward pass, inputs included. ``real`` is whether to use the GPU; by default if there is one. With
    ``tensor_parallel`` so many neighbours of the world share a replica: ``parallelise`` divides the model over a mesh
    of them.
    """
    real = torch.cuda.is_available() if real is None else real
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank} does not exist in a world of {world}")
    if world % tensor_parallel:
        raise ValueError(f"tensor parallelism of {tensor_parallel} does not divide a world of {world}")
    if options.get("offload") == AUTO:
        raise ValueError('offload="auto" is chosen where a job starts; name one to run it dry')
    offload = _as_run(Offload.parse(options.get("offload")), world, real)
    options["offload"] = offload
    with compat.one_rank_of(world, rank):
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
    """An offload that is in a few steps as it is in the long run, and that the plan can be asked about."""
    if offload is None:
        return None
    if offload.delayed_update_after is not None:
        offload = replace(offload, delayed_update_after=min(offload.delayed_update_after, DELAYED_AFTER))
    if offload.host_fraction == "auto" and offload.device_memory is None:
        device = torch.device("cuda" if real else "cpu")
        offload = replace(offload, device_memory=room_for_states(device, local_ranks=world))
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
    gc.collect()  # an earlier model, which refers to itself, would count, or go in the midst of it
    before = torch.cuda.memory_allocated()
    with torch.device("meta"):
        model = build()
    model, stepper = shard(model, optimizer(model), init="empty", **options)
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        _train(model, stepper, loss)
        torch.cuda.synchronize()
    peak, rest = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    with _AtPeak(runtime_of(model), lambda: torch.cuda.memory_allocated() - before, peak) as seen:
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
            if checkpoints is not None and checkpoints.stores.host is not None:
                live.ignore([block.memory for block in checkpoints.stores.host.blocks])
        peak, rest = live.peak, live.now()
        with _AtPeak(runtime, live.now, peak) as seen:
            _train(model, stepper, loss)
        return _report(model, peak, rest, seen.memory, real=False)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[nn.Module], Tensor]) -> None:
    loss(model).backward()
    host = runtime_of(model).host
    if host is not None:  # or what is on its way to the host would count for the device
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


class _AtPeak(compat.OperationWatch):
    """Looks at memory by kind the first time that it is as much as it ever was."""

    def __init__(self, runtime: Runtime, now: Callable[[], int], peak: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runtime, self._now, self._enough = runtime, now, AT_PEAK * peak
        self.memory = Memory()

    def see(self, tensors: list[Tensor]) -> None:
        if not self.memory.total and self._now() >= self._enough:
            self.memory = self._runtime.ledger.now()


class _LiveStorages(compat.OperationWatch):
    """Bytes of the storages that operations have made and that are still alive."""

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
        """Flats whose storage is emptied and filled again, which no operation shows.

        There may be thousands: all of them are looked at only when ``gathers`` has changed, so that one may be filled.
        """
        self._flats = {compat.storage_key(flat.whole): flat for flat in flats}
        self._gathers = gathers
        for key in self._flats:
            self._forget(key)

    def ignore(self, tensors: list[Tensor]) -> None:
        """Memory of the host, which is another's."""
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
