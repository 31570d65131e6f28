"""The result of tracing a model: its units, its activations and its FLOPs. All numbers of a plan come from here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..time.work import Work
from .units import UnitShape

BLOCK_FLOPS = 24
"""FLOPs of the matrix products in the forward of a GPT block, divided by tokens · hidden², a typical product."""


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of activations on the device. Tuples go by unit, the root first."""

    saved: int
    """All that forward saves for backward."""
    forward: tuple[int, ...]
    """The maximum while the forward of a unit runs, with everything that earlier units saved."""
    loss: int
    """The maximum between the forward of the last unit and the backward of that unit."""
    backward: tuple[int, ...]
    """The maximum while the backward of a unit runs and its gradients have no buffer. Those that have arrived count."""
    depositing: tuple[int, ...]
    """The maximum while the backward of a unit runs and its gradients have a buffer.

    The buffer does not count. Gradients count until they are copied to it.
    """
    after_backward: tuple[int, ...]
    """The bytes at the moment when the last gradient of a unit has arrived."""
    host: int = 0
    """The maximum of host memory for checkpoints."""
    early_root_gradients: int = 0
    """Gradients of the root that arrive before those of the blocks."""

    @classmethod
    def none(cls, units: int) -> ActivationBytes:
        """No activations, for a model that was not traced."""
        nothing = (0,) * units
        return cls(0, nothing, 0, nothing, nothing, nothing)


@dataclass(frozen=True)
class Trace:
    """A model known from a trace, for one precision, batch and sequence, and for one model-parallel rank."""

    units: tuple[UnitShape, ...]
    buffers: int
    """Bytes."""
    activations: ActivationBytes
    kinds: tuple[int, ...] = ()
    """By unit: the number of the unit that was traced for it. Neighbours of one kind differ only in what earlier units
    have saved. Empty if every unit was traced by itself."""
    forward_flops: tuple[float, ...] = ()
    """By unit; empty if they are not known."""
    matrix_flops: tuple[float, ...] = ()
    """The part of ``forward_flops`` in matrix products with parameters, which is without attention."""
    forward_written: tuple[float, ...] = ()
    """Elements of activations that forward writes, by unit."""
    backward_ratio: float = 2.0
    """FLOPs of the blocks' backward with recomputation, divided by the FLOPs of their forward."""
    logits: float = 0.0
    """Elements in the input of the cross-entropy."""
    recomputes: bool = False
    """True if blocks are recomputed in backward, by the module itself or by ``shard(activations=...)``."""
    kept: frozenset[int] = frozenset()
    """The blocks that keep their activations though others are recomputed, by number; the first block is 1."""
    stream: tuple[int, ...] = ()
    """Bytes of activations that a unit gets, by unit. They are its checkpoint, if it is recomputed."""
    checkpoints: int = 0
    """Bytes of all checkpoints that this rank stores, with ``shard(activations=...)``."""
    gathered_checkpoints: int = 0
    """Elements of checkpoints that model-parallel ranks gather (P_a), with padding."""
    tokens_known: bool = True
    """True if inputs are sequences of tokens; False if they are samples of another kind."""

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len({unit.block for unit in self.units if unit.block})

    @property
    def parameters(self) -> int:
        """Ψ, of one model-parallel rank."""
        return sum(flat.parameters for unit in self.units for flat in unit.flats)

    @property
    def work(self) -> Work | None:
        """The work that times follow from; None if FLOPs are not known."""
        if not sum(self.forward_flops):
            return None
        blocks: dict[int, float] = dict.fromkeys((unit.block for unit in self.units), 0.0)
        for unit, flops in zip(self.units, self.matrix_flops, strict=True):
            blocks[unit.block] += flops
        largest = max((flops for block, flops in blocks.items() if block), default=blocks[0])
        parts = Counter(unit.block for unit in self.units if unit.block)
        root = [flat.parameters for flat in self.units[0].flats if flat.trained]
        has_head = len(root) > 1 and self.activations.early_root_gradients
        streams = [size for size in self.stream[1:] if size]
        return Work(
            parameters=tuple(sum(flat.parameters for flat in unit.flats) for unit in self.units),
            trained=tuple(sum(flat.parameters for flat in unit.flats if flat.trained) for unit in self.units),
            forward=self.forward_flops,
            backward=self.backward_ratio,
            written=(0.0, *self.forward_written[1:]),
            product=largest / BLOCK_FLOPS,
            logits=self.logits,
            stream=sum(streams) / len(streams) if streams else 0.0,
            parts=max(parts.values(), default=1) if len(set(parts.values())) == 1 else 1,
            head=sum(root[1:]) / sum(root) if has_head else 0.0,
            recomputed=1 - len(self.kept) / max(1, len(parts)),
        )
