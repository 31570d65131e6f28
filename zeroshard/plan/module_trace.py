"""The result of tracing a module of any kind: its units, activations and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

from .activations import ActivationBytes
from .shape import Setup, Transformer, Work
from .units import UnitShape, transformer_units

BLOCK_FLOPS = 24
"""FLOPs of the forward of a transformer block, divided by tokens · hidden², the multiply-adds of one product."""


@dataclass(frozen=True)
class ModuleTrace:
    """A model known from a trace, for one precision, batch and sequence."""

    name: str
    units: tuple[UnitShape, ...]
    buffers: int
    activations: ActivationBytes
    forward_flops: tuple[float, ...] = ()
    """By unit; empty if they are not known."""
    forward_written: tuple[float, ...] = ()
    """Elements of activations that forward writes, by unit."""
    backward_flops: float = 0.0
    logits: float = 0.0
    """Elements in the input of the cross-entropy."""
    recomputes: bool = False
    """True if blocks are recomputed in backward, by the module itself or by ``shard(activations=...)``."""
    checkpoints: int = 0
    """Bytes of the checkpoints of all blocks, with ``shard(activations=...)``."""
    tokens_known: bool = True
    """True if inputs are sequences of tokens; False if they are samples of another kind."""

    @property
    def parameters(self) -> int:
        """Ψ."""
        return sum(flat.parameters for unit in self.units for flat in unit.flats)

    @property
    def work(self) -> Work | None:
        """The work that times follow from; None if FLOPs are not known.

        The size of a typical product is that of a transformer block with as many FLOPs as the largest unit.
        """
        forward = self.forward_flops
        if not sum(forward):
            return None
        root, blocks = forward[0], sum(forward[1:])
        return Work(
            parameters=tuple(sum(flat.parameters for flat in unit.flats) for unit in self.units),
            trained=tuple(sum(flat.parameters for flat in unit.flats if flat.trained) for unit in self.units),
            forward=forward,
            # The backward of the root takes two of its forwards; that of a frozen root takes none, hence ``max``.
            backward=max(0.0, self.backward_flops - 2 * root) / blocks if blocks else 2.0,
            written=(0.0, *self.forward_written[1:]),
            product=max(forward[1:] or forward) / BLOCK_FLOPS,
            logits=self.logits,
            checkpoint=self.checkpoints / max(1, len(self.units) - 1),
        )


Model = Transformer | ModuleTrace


def units_of(model: Model, setup: Setup) -> tuple[UnitShape, ...]:
    """The units of one rank, the root first."""
    return model.units if isinstance(model, ModuleTrace) else transformer_units(model, setup)
