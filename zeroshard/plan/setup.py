"""How a model is trained, as numbers: the stage, the ranks, the batch, where states and checkpoints are."""

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


class FirstValues(NamedTuple):
    """How a model has its first values when ``shard()`` begins, or gets them."""

    present: int
    """Bytes of its parameters that are on the device already."""
    initialised: int
    """Bytes of an element, if units are made whole for initialisers, in the dtype of the model on meta; else 0."""


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
    first_values: FirstValues | None = None
    """How first values come, if ``shard()`` itself counts as a moment that could be the peak."""

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
