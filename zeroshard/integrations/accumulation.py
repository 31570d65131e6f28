"""What a library's own loop does while micro-batches accumulate."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

from ..api import no_sync
from ..config.table import Extent
from ..runtime import is_sharded, runtime_of


def accumulating(model: nn.Module) -> AbstractContextManager[None]:
    """Micro-batches inside reduce nothing, where a rank has whole gradients anyway (stages 0 and 1).

    Where gradients are shards, each micro-batch is reduced: whole gradients would take the memory that sharding saves.
    ``zeroshard.no_sync(model)`` takes that memory.
    """
    whole = is_sharded(model) and runtime_of(model).table.gradients.extent is Extent.WHOLE
    return no_sync(model) if whole else nullcontext()
