"""What a plan is about: the shape of a model, and how it is to be trained. Pure numbers, no tensors.

A model is a root unit and blocks, as ``layout.find_units`` divides it. Sizes are elements unless a name says bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..config.offload import Offload
from ..config.options import Activations

WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

MOST_LAYERS = 2048
"""Twice the deepest transformers that were trained; more is a mistake, and would take minutes to plan."""


class ModelError(ValueError):
    """A model that cannot be planned for; the message says why and what to do."""


class Activation(NamedTuple):
    """An MLP's nonlinearity as torch runs it, in tensors of the MLP's width; by default one kernel, as GELU has."""

    saved: int = 2
    """Left for backward: of what it takes, makes on its way and gives."""
    forward_peak: int = 2
    """Alive at a time in a forward that keeps nothing."""
    backward_extra: int = 1
    """Alive at a time in backward, beside those that are kept."""
    written: int = 1
    """Made by forward."""


class Habits(NamedTuple):
    """What the code of a block leaves for backward that its sizes do not tell."""

    activation: Activation = Activation()
    copies: int = 0
    """Tensors of the queries' width that attention leaves beside queries, keys, values and result."""
    cached_copies: int = 0
    """The same where a key-value cache is written, as Hugging Face's models do unless blocks are recomputed."""
    one_input: bool = False
    """Whether attention and MLP read the same tensor, side by side."""
    dropouts: int = 0
    """Masks over the residual stream that a block leaves, of one byte an element; attention's leaves none."""
    embedding_dropout: bool = False


OUR_HABITS = Habits()
"""Those of our own GPT."""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder of equal blocks."""

    name: str = ""
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int = 0
    """Learned positions; 0 for rotary ones."""
    kv_heads: int | None = None
    """Heads of keys and values, where fewer than ``heads`` share them."""
    head_width: int | None = None
    """Of one head; hidden / heads by default."""
    intermediate: int | None = None
    """Width of the MLP; 4 · hidden by default."""
    gated: bool = False
    """Whether the MLP has a third matrix (SwiGLU)."""
    biases: bool = True
    tied: bool = True
    """Whether the head is the token embedding."""
    head_norms: bool = False
    """Whether queries and keys are normed, head by head."""
    habits: Habits = OUR_HABITS

    @property
    def mlp_width(self) -> int:
        return self.intermediate or 4 * self.hidden

    @property
    def kv_width(self) -> int:
        return (self.head_width or self.hidden // self.heads) * (self.kv_heads or self.heads)

    @property
    def query_width(self) -> int:
        return self.head_width * self.heads if self.head_width else self.hidden

    @property
    def normed_width(self) -> int:
        """Elements a token of the queries and keys that are normed."""
        return self.query_width + self.kv_width if self.head_norms else 0

    @property
    def activation(self) -> Activation:
        """Of the MLP, with the gate's partner and their product where it is gated."""
        alone = self.habits.activation
        if not self.gated:
            return alone
        return Activation(alone.saved + 2, max(3, alone.forward_peak), 2, alone.written + 2)

    @property
    def block_matrices(self) -> int:
        """Elements of one block's matrices, which are what it multiplies by."""
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        return attention + (3 if self.gated else 2) * self.hidden * self.mlp_width

    @property
    def block(self) -> int:
        """Parameters of one block.

        >>> Transformer(layers=48, hidden=1600, heads=25, vocabulary=50257, positions=1024).block
        30740800
        """
        norms = 2 * self.hidden * (2 if self.biases else 1)
        biases = self.query_width + 2 * self.kv_width + 2 * self.hidden + self.mlp_width if self.biases else 0
        return self.block_matrices + norms + biases + sum(self.head_norm_sizes)

    @property
    def head_norm_sizes(self) -> list[int]:
        """Elements of the weights that norm queries and keys."""
        return [self.query_width // self.heads] * 2 if self.head_norms else []

    def block_written(self, ranks: int = 1) -> float:
        """Activations that one block's forward writes for a token, on one of the ranks that share the block.

        Norms, what comes out of attention and MLP, and both sums are whole on each of them.
        """
        attention = 2 * self.query_width + 2 * self.kv_width + self.normed_width
        mlp = (1 + self.activation.written) * self.mlp_width
        return (6 + self.habits.dropouts) * self.hidden + (attention + mlp) / ranks

    @property
    def root(self) -> int:
        """Parameters outside the blocks: embeddings, positions, the last norm and the head."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.positions * self.hidden + self.hidden * (2 if self.biases else 1)

    @property
    def units(self) -> list[int]:
        """Parameters of each unit, the root first."""
        return [self.root, *[self.block] * self.layers]

    @property
    def parameters(self) -> int:
        """Ψ.

        >>> Transformer(layers=48, hidden=1600, heads=25, vocabulary=50257, positions=1024).parameters
        1557611200
        """
        return self.root + self.layers * self.block

    def forward_flops(self, batch: int, sequence: int) -> float:
        """Of one forward pass over a micro-batch: matrices, attention and head."""
        tokens = batch * sequence
        matrices = 2.0 * tokens * (self.layers * self.block_matrices + self.vocabulary * self.hidden)
        attention = 4.0 * tokens * sequence * self.query_width * self.layers
        return matrices + attention


class Work(NamedTuple):
    """What the time of a step follows from, unit by unit, the root first: of one rank and micro-batch."""

    parameters: tuple[float, ...]
    """Elements that are gathered."""
    trained: tuple[float, ...]
    """Elements that are reduced and updated."""
    forward: tuple[float, ...]
    """FLOPs."""
    backward: float
    """FLOPs of a block's backward, recomputation included, in those of its forward."""
    written: tuple[float, ...]
    """Activations that forward writes, elements; of blocks, not of the root, which has the loss."""
    product: float
    """Multiply-adds of a typical product, on which the speed of all depends."""
    logits: float = 0.0
    """Elements that the loss passes over, in fp32."""
    checkpoint: float = 0.0
    """Bytes of what is kept of a block that is recomputed, on average."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a model is to be trained."""

    stage: int
    world: int = 1
    """Data-parallel ranks."""
    model_parallel: int = 1
    """Ranks that share one replica by tensor parallelism; each has an M-th of every block."""
    offload: Offload | None = None
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "bf16"
    masters: bool = True
    """Whether fp32 masters stand behind 16-bit parameters; if not, moments have the parameters' precision."""
    cast_on_gather: bool = False
    """Stage 3: no 16-bit shard beside the master."""
    batch: int = 1
    """Sequences a rank and micro-batch."""
    sequence: int = 1024
    micro_batches: int = 1
    checkpointing: bool = True
    """Keep one tensor a block from forward to backward, and recompute the rest."""
    activations: Activations | None = None
    """What becomes of what checkpointing keeps: divided among model-parallel ranks (P_a), on the host (P_a+cpu)."""
    moments: int = 2
    """Tensors of a parameter's size that the optimizer keeps."""
    prefetch: int = 1
    keep: int = field(default=1)
    """Stage 3: blocks held from forward to backward, the last ones."""
    keep_root: bool = True
    max_unit_bytes: int = 1 << 30
    """A block above this is several units."""

    @property
    def width(self) -> int:
        """Bytes of a parameter."""
        return WIDTHS[self.precision]

    @property
    def master_width(self) -> int:
        """Bytes of a master beside the parameter; 0 where the parameter is its own."""
        return 4 if self.masters and self.width < 4 else 0

    @property
    def moment_width(self) -> int:
        """Bytes of an element of what the optimizer keeps on the device."""
        return self.master_width or self.width

    @property
    def devices(self) -> int:
        return self.world * self.model_parallel
