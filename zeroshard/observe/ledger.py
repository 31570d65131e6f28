"""Where the bytes are: model states by kind, read off the live buffers, never kept as counters that could drift.

A step notes what it is about to consume, which is not there any more when somebody asks: gradients, and units that are
gathered. What rests is read when it is asked for; the optimizer's states too, unless the step is what makes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from torch import Tensor, nn

from ..comm.traffic import Traffic
from ..config.table import Place
from ..optim.piece_states import PieceStates
from ..states.unit import Unit
from ..system import compat


@dataclass(frozen=True)
class Memory:
    """Bytes of this rank's model states in one place, by kind, and of what else is kept there."""

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
    checkpoints: int = 0
    """On the host: the pool that activation checkpoints wait in."""

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

    What tensor parallelism itself moves is not in it: that is torch's, and counted by ``comm.traffic``."""
    parameters: int
    """Ψ: the elements of all parameters; with tensor parallelism, of this rank's parts of them."""
    padded_parameters: int
    """Ψ as it is communicated: the elements of all flats, padding included."""
    kept_parameters: int
    """Ψ_kept: flat elements of units that are held from forward to backward (stage 3)."""
    memory: Memory
    """This rank's memory now."""
    host_memory: Memory | None
    """With offload: this rank's states in host memory. Gradients there include the slots they land in. With
    ``Activations(offload=True)``, also what checkpoints wait in."""
    host_traffic: Mapping[str, int]
    """With offload: bytes of model states "to the host" and "to the device" that the last step asked for, also where
    the copies are made behind the next one."""
    checkpoint_traffic: Mapping[str, int]
    """With ``Activations(offload=True)``: bytes of activation checkpoints "to the host" and "to the device" in the last
    step, beside ``host_traffic``."""
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


class Ledger:
    """The memory of one model on this rank."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], states: PieceStates | None) -> None:
        self._model, self._states = model, states
        self._flats = [flat for unit in units for flat in unit.flats]
        self._gathering = [flat for flat in self._flats if flat.sharded]
        self._noted: Memory | None = None
        self._known_states: tuple[object, int] = (None, 0)

    def now(self) -> Memory:
        """This rank's memory at this moment."""
        return replace(self._with_resting(self._passing()), optimizer_states=self._optimizer_states())

    def note_step(self) -> None:
        """Between backward and update."""
        shape = None if self._states is None else self._states.shape()
        if shape != self._known_states[0]:
            self._known_states = (shape, self._optimizer_states())
        self._noted = replace(self._passing(), optimizer_states=self._known_states[1])

    def at_step(self) -> Memory | None:
        """As it was between backward and update of the last step; None if there was none.

        Parameters and buffers are counted when it is asked for: no step changes how large they are.
        """
        return None if self._noted is None else self._with_resting(self._noted)

    def _passing(self) -> Memory:
        """What comes and goes within a step."""
        gradients: list[Tensor] = []
        accumulators: list[Tensor] = []
        for flat in self._flats:
            if flat.trainable:
                found = flat.home.on_device()
                gradients += [*flat.gradient.tensors(), *found.gradients]
                accumulators += found.accumulators
        return Memory(
            gradients=_bytes(gradients),
            accumulators=_bytes(accumulators) - _bytes_of_both(gradients, accumulators) if accumulators else 0,
            gathered=_bytes(flat.whole for flat in self._gathering),
        )

    def _with_resting(self, memory: Memory) -> Memory:
        """With what no step changes the size of."""
        return replace(
            memory,
            parameters=_bytes(flat.shard for flat in self._flats if flat.has_shard),
            buffers=_bytes(self._model.buffers()),
        )

    def _optimizer_states(self) -> int:
        masters = [master for flat in self._flats for master in flat.home.on_device().masters]
        return _bytes([*masters, *([] if self._states is None else self._states.on_device())])

    def on_host(self, ring: int, checkpoints: int) -> Memory:
        """This rank's model states in host memory, with the bytes of the buffers that gradients share in turn.

        ``checkpoints`` are the bytes for activation checkpoints.
        """
        sizes = {"gradients": ring}
        for flat in self._flats:
            for kind, size in flat.home.on_host().items():
                sizes[kind] = sizes.get(kind, 0) + size
        return Memory(place=Place.HOST, checkpoints=checkpoints, **sizes)


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    sizes = ((compat.storage_key(tensor), tensor.untyped_storage().nbytes()) for tensor in tensors)
    return {key: size for key, size in sizes if size}


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind tensors, each counted once."""
    return sum(_storages(tensors).values())


def _bytes_of_both(some: Iterable[Tensor], others: Iterable[Tensor]) -> int:
    mine = _storages(some)
    return sum(size for pointer, size in _storages(others).items() if pointer in mine)
