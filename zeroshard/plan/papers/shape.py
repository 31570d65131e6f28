"""The shape of a GPT of the papers: only numbers, no tensors. Sizes are elements.

The papers' sizes are computed with the papers' own formulas, so that a claim does not depend on this runtime. All other
models are built and traced (``plan/model``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..setup import Setup
from ..time.work import Work

MOST_PARTS = 6
"""The most units of a block: its two norms, and the two matrices of attention and of the MLP."""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A GPT of equal blocks: biases, LayerNorm, an MLP four times as wide, and a head that is the token embedding."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int = 0

    @property
    def block(self) -> int:
        """Parameters of one block: its matrices, biases and norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def root(self) -> int:
        """Parameters outside the blocks: embeddings, positions and the last norm."""
        return (self.vocabulary + self.positions + 2) * self.hidden

    @property
    def parameters(self) -> int:
        """Ψ.

        >>> gpt(layers=48, hidden=1600).parameters
        1557611200
        """
        return self.root + self.layers * self.block

    def paper_activations(self, setup: Setup, *, divided: bool = False) -> float:
        """Bytes of activations by ZeRO's estimate: 12 · hidden · batch · sequence · layers elements (section 3).

        With checkpointing 1 takes the place of 12. ``divided``: the model-parallel ranks divide checkpoints (P_a).
        """
        tensors = 1 if setup.checkpointing else 12
        ranks = setup.model_parallel if divided else 1
        return setup.width * tensors * self.hidden * setup.batch * setup.sequence * self.layers / ranks

    def work(self, setup: Setup) -> Work:
        """The work of one rank."""
        ranks, tokens = setup.model_parallel, setup.batch * setup.sequence
        parts = min(MOST_PARTS, math.ceil(self.block * setup.width / ranks / setup.max_unit_bytes))
        count = self.layers * parts
        units = (self.root / ranks, *[self.block / ranks / parts] * count)
        block = tokens * (2 * 12 * self.hidden**2 + 4 * setup.sequence * self.hidden) / ranks
        # Norms, the outputs of attention and MLP, and both sums are whole on each rank.
        written = tokens * self.hidden * (6 + (4 + 8) / ranks)
        return Work(
            parameters=units,
            trained=units,
            forward=(2.0 * tokens * self.vocabulary * self.hidden / ranks, *[block / parts] * count),
            backward=3 if setup.checkpointing else 2,
            written=(0.0, *[written / parts] * count),
            product=tokens * self.hidden**2 / ranks,
            logits=tokens * self.vocabulary / ranks,
            stream=tokens * self.hidden * setup.width,
            parts=parts,
        )


def gpt(layers: int, hidden: int) -> Transformer:
    """A model of the papers: GPT-2 in another size."""
    return Transformer(layers=layers, hidden=hidden, heads=max(1, hidden // 128), vocabulary=50257, positions=1024)
