"""The shape of a model, and the setup that it is trained with: only numbers, no tensors.

A model is a root unit and blocks, divided as in ``config/layout.py``. Sizes are elements unless the name says bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..config.bounds import DEFAULT_PREFETCH
from ..config.offload import Offload
from ..config.options import Activations

WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

MOST_LAYERS = 2048
"""The deepest model that is planned: twice the deepest transformers that were ever trained. More is a mistake, and the
plan would take minutes."""


class ModelError(ValueError):
    """A model that cannot be planned. The message says why, and what to do."""


class Activation(NamedTuple):
    """The memory of an MLP's activation function in torch, counted in tensors of the MLP's width.

    The default is a function that runs as one kernel, such as GELU.
    """

    saved: int = 2
    """Tensors saved for backward: of its input, its intermediate results and its output."""
    forward_peak: int = 2
    """The maximum of tensors alive in a forward that saves nothing."""
    backward_extra: int = 1
    """The maximum of tensors alive in backward, in addition to the saved ones."""
    written: int = 1
    """Tensors that forward writes."""


class Habits(NamedTuple):
    """How the code of a block uses memory, where the sizes of the block do not show it."""

    activation: Activation = Activation()
    copies: int = 0
    """Tensors of the queries' width that attention saves in addition to queries, keys, values and result."""
    cached_copies: int = 0
    """The same with a key-value cache. Hugging Face's models write one unless blocks are recomputed."""
    one_input: bool = False
    """True if attention and MLP both read the input of the block (parallel residual)."""
    dropouts: int = 0
    """Dropout masks of the residual stream that a block saves, one byte an element. Dropout in attention saves none."""
    embedding_dropout: bool = False


OUR_HABITS = Habits()
"""The habits of the GPT of ``zeroshard train``."""


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
    """Heads of keys and values, if several query heads share one."""
    head_width: int | None = None
    """Width of one head; hidden / heads by default."""
    intermediate: int | None = None
    """Width of the MLP; 4 · hidden by default."""
    gated: bool = False
    """True if the MLP has a third matrix (SwiGLU)."""
    biases: bool = True
    tied: bool = True
    """True if the head and the token embedding are one matrix."""
    head_norms: bool = False
    """True if queries and keys are normed, head by head."""
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
        """Elements of normed queries and keys for one token."""
        return self.query_width + self.kv_width if self.head_norms else 0

    @property
    def activation(self) -> Activation:
        """The activation function of the MLP. In a gated MLP: with the gate's partner and their product."""
        alone = self.habits.activation
        if not self.gated:
            return alone
        return Activation(alone.saved + 2, max(3, alone.forward_peak), 2, alone.written + 2)

    @property
    def block_matrices(self) -> int:
        """Elements of the matrices of one block."""
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
        """Elements of activations that the forward of one block writes for a token, on one of ``ranks`` that share it.

        Norms, the outputs of attention and MLP, and both sums are whole on each rank.
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
        """FLOPs of one forward pass over a micro-batch: matrices, attention and head."""
        tokens = batch * sequence
        matrices = 2.0 * tokens * (self.layers * self.block_matrices + self.vocabulary * self.hidden)
        attention = 4.0 * tokens * sequence * self.query_width * self.layers
        return matrices + attention


class Work(NamedTuple):
    """The work of one rank in a micro-batch; times follow from it. Tuples go by unit, the root first."""

    parameters: tuple[float, ...]
    """Elements that are gathered."""
    trained: tuple[float, ...]
    """Elements that are reduced and updated."""
    forward: tuple[float, ...]
    """FLOPs."""
    backward: float
    """FLOPs of a block's backward with recomputation, divided by the FLOPs of its forward."""
    written: tuple[float, ...]
    """Elements of activations that forward writes. Only blocks count; ``logits`` stands for the root."""
    product: float
    """Multiply-adds of a typical matrix product. The speed of all products follows from this size."""
    logits: float = 0.0
    """Elements of the logits, which the loss reads in fp32."""
    checkpoint: float = 0.0
    """Bytes of a block's checkpoint, on average."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a model is trained."""

    stage: int
    world: int = 1
    """Data-parallel ranks."""
    model_parallel: int = 1
    """Ranks that share one replica by tensor parallelism. Each has an M-th of every block."""
    offload: Offload | None = None
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "bf16"
    masters: bool = True
    """True if 16-bit parameters have fp32 masters. Otherwise moments have the parameters' precision."""
    cast_on_gather: bool = False
    """Stage 3: gathering casts the master, and there is no 16-bit shard."""
    batch: int = 1
    """Sequences of a rank in a micro-batch."""
    sequence: int = 1024
    micro_batches: int = 1
    checkpointing: bool = True
    """True if forward stores one tensor of each block, and backward recomputes the rest."""
    activations: Activations | None = None
    """Where checkpoints are stored: divided among model-parallel ranks (P_a), or on the host (P_a+cpu)."""
    moments: int = 2
    """Tensors of a parameter's size in the optimizer's state."""
    prefetch: int = DEFAULT_PREFETCH
    """Stage 3: the number of units that are gathered before they are needed."""
    keep: int = 1
    """Stage 3: the number of last blocks that stay gathered from forward to backward."""
    keep_root: bool = True
    """Stage 3: True if the root stays gathered from forward to backward."""
    max_unit_bytes: int = 1 << 30
    """A larger block is divided into several units."""

    @property
    def width(self) -> int:
        """Bytes of a parameter."""
        return WIDTHS[self.precision]

    @property
    def master_width(self) -> int:
        """Bytes of a master; 0 if the parameter is its own master."""
        return 4 if self.masters and self.width < 4 else 0

    @property
    def moment_width(self) -> int:
        """Bytes of one element of the optimizer's moments on the device."""
        return self.master_width or self.width

    @property
    def devices(self) -> int:
        return self.world * self.model_parallel
