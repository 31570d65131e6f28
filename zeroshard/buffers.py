"""Buffers that a model writes while it trains, such as batch norm's running statistics, follow rank 0, as in DDP.

(With tensor parallelism: the first rank that has the same part of the model, whose buffers may be of that part.)
DDP broadcasts them before every forward. Here a step does, and only if some rank wrote to one since the last: a model
whose buffers are constants pays nothing.
"""

from __future__ import annotations

from torch import Tensor, nn

from . import compat, parallel
from .comm import Fabric


class Buffers:
    """The buffers of a model, and whether they were written."""

    def __init__(self, model: nn.Module, fabric: Fabric) -> None:
        self._model, self._fabric = model, fabric
        self._seen: list[tuple[int, int]] = []
        self._kept: dict[int, tuple[Tensor | None, int]] = {}
        self.differ = False
        """Some rank wrote to a buffer, as the ranks agreed."""
        self.look()

    def look(self) -> bool:
        """Whether this rank wrote to a buffer, or replaced one, since the last look."""
        before = self._seen
        self._seen = [(id(buffer), compat.version(buffer)) for buffer in self._model.buffers()]
        return self._seen != before

    def remember(self) -> None:
        """Keeps a copy of every buffer that was written or replaced since the last time, to go back to."""
        for buffer in self._model.buffers():
            version = compat.version(buffer)
            if self._kept.get(id(buffer), (None, -1))[1] != version:
                self._kept[id(buffer)] = (buffer.detach().clone(), version)

    def recall(self) -> None:
        """Goes back to what was remembered."""
        for buffer in self._model.buffers():
            copy, version = self._kept.get(id(buffer), (None, -1))
            if copy is not None and compat.version(buffer) != version and copy.shape == buffer.shape:
                buffer.data.copy_(copy)

    def follow_rank_zero(self) -> None:
        """Takes rank 0's values where the ranks agreed that they differ."""
        if self.differ:
            for buffer in self._model.buffers():
                self._fabric.broadcast(parallel.local(buffer.data), divided=True)
            self.differ = False
            self.look()
