"""Where the bytes are: model states by kind, read off the live buffers, never kept as counters that could drift."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from torch import Tensor, nn

from .. import compat
from ..offload.pipeline import Pipeline
from ..table import Place
from ..traffic import Traffic
from ..unit import Unit


@dataclass(frozen=True)
class Memory:
    """Bytes of this rank's model states in one place, by kind."""

    place: Place = Place.DEVICE
    """Where they are. Everything is on the device until something is offloaded."""
    parameters: int = 0
    """Parameters at rest: whole, or this rank's shards."""
    gradients: int = 0
    """Gradients in the parameters' precision, whole or shards, and those still on their way."""
    accumulators: int = 0
    """Gradients of several micro-batches in the accumulation dtype."""
    optimizer_states: int = 0
    """Masters and what the optimizer keeps (momentum, variance)."""
    gathered: int = 0
    """Whole parameters of units that are gathered at this moment, where parameters rest as shards."""
    buffers: int = 0
    """Buffers of the model."""

    @property
    def total(self) -> int:
        return sum(getattr(self, entry.name) for entry in fields(self) if entry.name != "place")

    @property
    def model_states(self) -> int:
        """What the papers' formulas count: parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer_states


@dataclass(frozen=True)
class Stats:
    """What ``zeroshard.stats(model)`` tells."""

    stage: int
    """The ZeRO stage that runs."""
    volume: Mapping[str, Traffic]
    """By collective, what the last completed step moved. A step runs from one ``optimizer.step()`` to the next."""
    volume_between: Mapping[str, Traffic]
    """With a mesh, what moved between replicas; ``volume`` is then what moved inside them."""
    volume_model: Mapping[str, Traffic]
    """With divided activation checkpoints (P_a), what moved between model-parallel ranks to put them together again.

    What tensor parallelism itself moves is not in it: that is torch's, and counted by ``observe.collectives``."""
    parameters: int
    """Ψ: the elements of all parameters; with tensor parallelism, of this rank's parts of them."""
    padded_parameters: int
    """Ψ as it is communicated: the elements of all flats, padding included."""
    kept_parameters: int
    """Ψ_kept: flat elements of units that are held from forward to backward (stage 3)."""
    memory: Memory
    """This rank's memory now."""
    host_memory: Memory | None
    """With offload: this rank's states in host memory. Gradients there include the slots they land in."""
    host_traffic: Mapping[str, int]
    """With offload: bytes "to the host" and "to the device" that the last step asked for, also where the copies are
    made behind the next one."""
    memory_at_step: Memory | None
    """This rank's memory between backward and update of the last step, as the papers count it."""
    grad_norm: float | None
    """Global gradient norm before clipping, of the last step; None if nothing asked for it. Reading it waits."""
    steps: int
    skipped_steps: int
    """Steps left out because fp16 gradients overflowed, or because of ``on_nonfinite``."""
    loss_scale: float | None
    stop_reason: str | None
    """With ``on_nonfinite="stop"``: what was not finite, after which no step is made."""

    @property
    def volume_elements(self) -> int:
        """Elements communicated in the last step; an all-reduce counts twice."""
        return sum(traffic.elements for traffic in self.volume.values())


def measure(model: nn.Module, units: Iterable[Unit], optimizer_tensors: Iterable[Tensor]) -> Memory:
    """This rank's memory at this moment."""
    flats = [flat for unit in units for flat in unit.flats]
    gradients: list[Tensor] = []
    accumulators: list[Tensor] = []
    for flat in flats:
        if flat.gradient is not None:
            held, extra = flat.gradient.tensors()
            gradients += held
            accumulators += extra
    masters = [flat.master for flat in flats if flat.separate_master and flat.host is None]
    return Memory(
        parameters=_bytes(flat.shard for flat in flats if flat.has_shard),
        gradients=_bytes(gradients) + sum(f.gradient.arena_bytes for f in flats if f.gradient is not None),
        accumulators=_bytes(accumulators) - _bytes_of_both(gradients, accumulators),
        optimizer_states=_bytes([*masters, *optimizer_tensors]),
        gathered=_bytes(flat.whole for flat in flats if flat.sharded),
        buffers=_bytes(model.buffers()),
    )


def measure_host(pipeline: Pipeline) -> Memory:
    """This rank's model states in host memory."""
    kinds = {"slot": "gradients", "total": "accumulators", "resting": "parameters", "fresh": "parameters"}
    sizes = dict.fromkeys(("gradients", "accumulators", "parameters", "optimizer_states"), 0)
    for states in pipeline.states:
        for name, tensor in states.tensors.items():
            sizes[kinds.get(name, "optimizer_states")] += tensor.nbytes
    sizes["gradients"] += pipeline.ring_bytes
    return Memory(place=Place.HOST, **sizes)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    sizes = ((compat.storage_key(tensor), tensor.untyped_storage().nbytes()) for tensor in tensors)
    return {key: size for key, size in sizes if size}


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind tensors, each counted once."""
    return sum(_storages(tensors).values())


def _bytes_of_both(some: Iterable[Tensor], others: Iterable[Tensor]) -> int:
    mine = _storages(some)
    return sum(size for pointer, size in _storages(others).items() if pointer in mine)
