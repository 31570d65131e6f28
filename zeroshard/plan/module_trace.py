"""A module of any kind as the plan takes it: what a trace has found."""

from __future__ import annotations

from dataclasses import dataclass

from .activations import ActivationBytes
from .shape import Setup, Transformer, Work
from .units import UnitShape, transformer_units

BLOCK_FLOPS = 24
"""Of a transformer block's forward, in multiply-adds of one of its products (tokens · hidden²)."""


@dataclass(frozen=True)
class ModuleTrace:
    """A model that was traced rather than described: its units and activations for one width, batch and sequence."""

    name: str
    units: tuple[UnitShape, ...]
    buffers: int
    activations: ActivationBytes
    forward_flops: tuple[float, ...] = ()
    """By unit; nothing if they are not known."""
    forward_written: tuple[float, ...] = ()
    """Elements of activations, by unit."""
    backward_flops: float = 0.0
    logits: float = 0.0
    """Elements that its cross-entropy passes over."""
    recomputes: bool = False
    """Whether blocks are recomputed in backward, by the module itself or by ``shard(activations=...)``."""
    checkpoints: int = 0
    """Bytes of what ``shard(activations=...)`` keeps of all blocks."""
    tokens_known: bool = True
    """Whether it is given so many sequences of so many tokens; if not, so many samples of some kind."""

    @property
    def parameters(self) -> int:
        """Ψ."""
        return sum(flat.parameters for unit in self.units for flat in unit.flats)

    @property
    def work(self) -> Work | None:
        """What its times follow from.

        Its products are taken to be those of a transformer block that has as many FLOPs as its largest unit.
        """
        forward = self.forward_flops
        if not sum(forward):
            return None
        root, blocks = forward[0], sum(forward[1:])
        return Work(
            parameters=tuple(sum(flat.parameters for flat in unit.flats) for unit in self.units),
            trained=tuple(sum(flat.parameters for flat in unit.flats if flat.trained) for unit in self.units),
            forward=forward,
            backward=max(0.0, self.backward_flops - 2 * root) / blocks if blocks else 2.0,  # a frozen root has none
            written=(0.0, *self.forward_written[1:]),
            product=max(forward[1:] or forward) / BLOCK_FLOPS,
            logits=self.logits,
            checkpoint=self.checkpoints / max(1, len(self.units) - 1),
        )


Model = Transformer | ModuleTrace


def units_of(model: Model, setup: Setup) -> tuple[UnitShape, ...]:
    """The units of one rank, the root first."""
    return model.units if isinstance(model, ModuleTrace) else transformer_units(model, setup)
