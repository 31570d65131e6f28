"""Where the bytes are: model states by kind, counted on the live buffers. There are no counters that could drift.

A step notes the bytes of gradients and gathered units, because the step consumes them and nobody could count them
later. Bytes at rest are counted when somebody asks. So are the optimizer's states; a step counts them again only if
there are new states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from torch import Tensor, nn

from ..comm.traffic import Traffic
from ..config.table import Place
from ..optim.piece_states import PieceStates
from ..states.unit import Unit
from ..system import compat


@dataclass(frozen=True)
class Memory:
    """Bytes of this rank's model states in one place, by kind, and of buffers and activation checkpoints there."""

    place: Place = Place.DEVICE
    """Where the bytes are. Everything is on the device unless it is offloaded."""
    parameters: int = 0
    """Parameters at rest: whole, or this rank's shards."""
    gradients: int = 0
    """Gradients in the parameters' precision, whole or shards, and gradients on their way to their home."""
    accumulators: int = 0
    """Gradients of several micro-batches in the accumulation dtype."""
    optimizer_states: int = 0
    """Masters, and the optimizer's states (momentum, variance)."""
    gathered: int = 0
    """Whole parameters of units that are gathered at this moment, where parameters rest as shards."""
    buffers: int = 0
    """Buffers of the model."""
    checkpoints: int = 0
    """On the host: the pool that activation checkpoints wait in."""

    @property
    def total(self) -> int:
        return sum(getattr(self, entry.name) for entry in fields(self) if entry.name != "place")

    def asleep(self, host: Memory | None) -> tuple[Memory, Memory]:
        """Device memory and host memory, where this memory of the device is asleep on the host. Buffers stay."""
        host = Memory(place=Place.HOST) if host is None else host
        names = [entry.name for entry in fields(self) if entry.name not in ("place", "buffers")]
        sums = {name: getattr(self, name) + getattr(host, name) for name in names}
        return Memory(buffers=self.buffers), replace(host, **sums)

    @property
    def model_states(self) -> int:
        """What the papers' formulas count: parameters, gradients and optimizer states. Without ``accumulators``."""
        return self.parameters + self.gradients + self.optimizer_states


@dataclass(frozen=True, kw_only=True)
class StepTraffic:
    """What the last completed step moved. A step runs from one ``optimizer.step()`` to the next."""

    volume: Mapping[str, Traffic] = field(default_factory=dict)
    """Volume by collective."""
    volume_between: Mapping[str, Traffic] = field(default_factory=dict)
    """With a mesh: volume between replicas. ``volume`` is then the volume inside replicas."""
    volume_model: Mapping[str, Traffic] = field(default_factory=dict)
    """With divided activation checkpoints (P_a): volume between model-parallel ranks, which put checkpoints together.

    The traffic of tensor parallelism itself is torch's, and is not counted."""
    host_traffic: Mapping[str, int] = field(default_factory=dict)
    """With offload: bytes of model states "to the host" and "to the device" that the last step asked for. Copies that
    are made during the next step count too."""
    checkpoint_traffic: Mapping[str, int] = field(default_factory=dict)
    """With ``Activations(offload=True)``: bytes of activation checkpoints "to the host" and "to the device".
    ``host_traffic`` does not include them."""

    @property
    def volume_elements(self) -> int:
        """Elements communicated in the last step; an all-reduce counts twice."""
        return sum(traffic.elements for traffic in self.volume.values())


@dataclass(frozen=True, kw_only=True)
class Stats(StepTraffic):
    """What ``zeroshard.stats(model)`` returns."""

    stage: int
    """The ZeRO stage that runs."""
    parameters: int
    """Ψ: the elements of all parameters. With tensor parallelism: of this rank's parts of them."""
    padded_parameters: int
    """Ψ as it is communicated: the elements of all flats, padding included."""
    kept_parameters: int
    """Ψ_kept: flat elements of units that stay gathered from forward to backward (stage 3)."""
    memory: Memory
    """This rank's memory now."""
    host_memory: Memory | None
    """With offload: this rank's states in host memory. Gradients there include the slots that they are copied to.
    With ``Activations(offload=True)``: also the pool of activation checkpoints."""
    memory_at_step: Memory | None
    """This rank's memory between backward and update of the last step, as the papers count it."""
    grad_norm: float | None
    """Global gradient norm before clipping, of the last step that computed it. Reading it waits for the device."""
    steps: int
    """Steps of the optimizer, skipped ones included."""
    skipped_steps: int
    """Steps left out because fp16 gradients overflowed, or because of ``on_nonfinite``."""
    loss_scale: float | None
    """With fp16: the factor that the loss is multiplied by."""
    stop_reason: str | None
    """With ``on_nonfinite="stop"``: what was not finite. No more steps are made then."""
    recomputed_blocks: int
    """With ``activations=``: how many blocks are recomputed. ``Activations(recompute="auto")`` begins with every block,
    and larger inputs than it has measured recompute every block too."""
    exposed_waits: Mapping[str, float]
    """Seconds since ``shard()`` in which this rank waited and had nothing else to do, by cause: the difference of two
    readings is what the steps between them lost. ``host_update`` and ``gradient_copies`` come with offload,
    ``agreement`` is the wait for other ranks in ``step()``. ``collectives`` counts on CPU ranks only: on a GPU the
    device waits for them, and only a trace can tell."""
    recompute_reason: str | None
    """With ``Activations(recompute="auto")``: why so many, once that is decided."""


class Ledger:
    """The memory of one model on this rank."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], states: PieceStates | None) -> None:
        self._model, self._states = model, states
        self._flats = [flat for unit in units for flat in unit.flats]
        self._noted: Memory | None = None
        self._known_states: tuple[object, int] = (None, 0)

    def now(self) -> Memory:
        """This rank's memory at this moment."""
        return replace(self._with_resting(self._passing()), optimizer_states=self._optimizer_states())

    def note_step(self) -> None:
        """Called between backward and update."""
        shape = None if self._states is None else self._states.shape()
        if shape != self._known_states[0]:
            self._known_states = (shape, self._optimizer_states())
        self._noted = replace(self._passing(), optimizer_states=self._known_states[1])

    def at_step(self) -> Memory | None:
        """The memory between backward and update of the last step; None if there was no step.

        Parameters and buffers are counted now: no step changes how large they are.
        """
        return None if self._noted is None else self._with_resting(self._noted)

    def _passing(self) -> Memory:
        """Memory that is used for a part of a step only."""
        trained = [flat for flat in self._flats if flat.trainable]
        found = [flat.home.on_device() for flat in trained]
        under_way = [tensor for flat in trained for tensor in flat.gradient.tensors()]
        gradients = compat.storage_sizes([*under_way, *(tensor for each in found for tensor in each.gradients)])
        accumulators = compat.storage_sizes([tensor for each in found for tensor in each.accumulators])
        return Memory(
            gradients=sum(gradients.values()),
            accumulators=sum(size for key, size in accumulators.items() if key not in gradients),
            gathered=_bytes(flat.whole for flat in self._flats if flat.sharded),
        )

    def _with_resting(self, memory: Memory) -> Memory:
        """Adds the memory whose size no step changes."""
        return replace(
            memory,
            parameters=_bytes(flat.shard for flat in self._flats if not flat.home.fills_shard),
            buffers=_bytes(self._model.buffers()),
        )

    def _optimizer_states(self) -> int:
        masters = [master for flat in self._flats for master in flat.home.on_device().masters]
        return _bytes([*masters, *([] if self._states is None else self._states.on_device())])

    def on_host(self, ring: int, checkpoints: int) -> Memory:
        """This rank's model states in host memory.

        ``ring`` is the bytes of the buffers that gradients use in turn. ``checkpoints`` is the bytes of the pool of
        activation checkpoints.
        """
        sizes = {"gradients": ring}
        for flat in self._flats:
            for kind, size in flat.home.on_host().items():
                sizes[kind] = sizes.get(kind, 0) + size
        return Memory(place=Place.HOST, checkpoints=checkpoints, **sizes)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(compat.storage_sizes(tensors).values())
