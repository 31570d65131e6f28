"""When the checkpoints of a step leave and come back: divided among model-parallel ranks (P_a), on the host (P_a+cpu).

As ``activations/kept.py`` does it, everything on one stream, in the order in which it was asked for: a block's input
starts down when its forward begins, and forward goes no further than ``ON_THEIR_WAY`` blocks beyond one that has not
left; when a block is recomputed, its own input and those of ``prefetch`` blocks before it are on their way up, each
this rank's part from the host, and then all parts from the ranks that share the model.
"""

from __future__ import annotations

from ..config.bounds import ON_THEIR_WAY
from .collective_time import CollectiveRing
from .machine_profile import Machine
from .shape import Setup, Transformer, Work
from .timeline import Resource, Timeline


class CheckpointTime:
    """The checkpoints of one micro-batch after another. Blocks count from 0."""

    def __init__(
        self, model: Transformer | Work, setup: Setup, machine: Machine, ring: CollectiveRing, timeline: Timeline
    ) -> None:
        kept = setup.activations
        assert kept is not None
        self._timeline, self._links = timeline, ring.resource
        if isinstance(model, Transformer):
            size: float = setup.batch * setup.sequence * model.hidden * setup.width
        else:
            size = model.checkpoint
        part = size / setup.model_parallel if kept.partition else size
        self._down = part / machine.pcie.down if kept.offload else 0.0
        self._up = part / machine.pcie.up if kept.offload else 0.0
        self._gather = ring.seconds(size) if kept.partition else 0.0
        self._prefetch = kept.prefetch
        self._stream = 0.0
        """When all is done that its stream was given."""
        self._left: list[float] = []
        self._there: dict[int, float] = {}

    def send(self) -> float:
        """As the forward of the next block begins: returns when it may."""
        if not self._down:
            return 0.0
        self._left.append(self._run(Resource.PCIE_DOWN, self._down, self._timeline.free(Resource.DEVICE)))
        return self._left[-1 - ON_THEIR_WAY] if len(self._left) > ON_THEIR_WAY else 0.0

    def bring_back(self, block: int) -> float:
        """As the recomputation of a block begins: returns when it may."""
        now = max(self._timeline.free(Resource.DEVICE), *self._left, 0.0)
        self._left.clear()
        for wanted in range(block, max(-1, block - 1 - self._prefetch), -1):
            if wanted not in self._there:
                here = self._run(Resource.PCIE_UP, self._up, now)
                self._there[wanted] = self._run(self._links, self._gather, here)
        return self._there.pop(block)

    def _run(self, resource: Resource, seconds: float, after: float) -> float:
        if seconds:
            self._stream = self._timeline.run(resource, seconds, after, self._stream)
        return max(after, self._stream)


def checkpoint_time(
    model: Transformer | Work, setup: Setup, machine: Machine, ring: CollectiveRing, timeline: Timeline
) -> CheckpointTime | None:
    """None where checkpoints stay where they are."""
    kept = setup.activations
    moves = setup.checkpointing and kept is not None and (kept.partition or kept.offload)
    return CheckpointTime(model, setup, machine, ring, timeline) if moves else None
