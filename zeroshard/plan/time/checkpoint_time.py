"""When the checkpoints of a step leave the device and come back (P_a: divided among ranks; P_a+cpu: on the host).

This follows the ``recompute`` room. All copies and gathers of checkpoints run on one stream, in the order of the calls.
The input of a block starts to the host when the forward of the block begins. Forward stops when the copy of a block
that lies ``ON_THEIR_WAY`` blocks back is not finished. When the recomputation of a block begins, the inputs of this
block and of ``prefetch`` blocks before it are on their way back: first this rank's part comes from the host, and then
the ranks that share the model gather all parts.
"""

from __future__ import annotations

from ...config.bounds import ON_THEIR_WAY
from ..machine.profile import Machine
from ..setup import Setup
from .collective_time import CollectiveRing
from .timeline import Resource, Timeline
from .work import Work


class CheckpointTime:
    """The checkpoints of one micro-batch after the other. Blocks count from 0."""

    def __init__(self, work: Work, setup: Setup, machine: Machine, ring: CollectiveRing, timeline: Timeline) -> None:
        options = setup.activations
        assert options is not None
        self._timeline, self._links = timeline, ring.resource
        size = work.stream
        part = size / setup.model_parallel if options.partition else size
        self._down = part / machine.pcie.down if options.offload else 0.0
        self._up = part / machine.pcie.up if options.offload else 0.0
        self._gather = ring.seconds(size) if options.partition else 0.0
        self._prefetch = options.prefetch
        self._stream = 0.0
        """The time when the stream has finished all its work."""
        self._left: list[float] = []
        """For each block of this forward: the time when its checkpoint has left the device."""
        self._there: dict[int, float] = {}
        """By block: the time when its checkpoint is back on the device."""

    def send(self) -> float:
        """Sends the checkpoint of the next block. Returns the time when the forward of that block may begin."""
        if not self._down:
            return 0.0
        self._left.append(self._run(Resource.PCIE_DOWN, self._down, self._timeline.free(Resource.DEVICE)))
        return self._left[-1 - ON_THEIR_WAY] if len(self._left) > ON_THEIR_WAY else 0.0

    def bring_back(self, block: int) -> float:
        """Brings the checkpoint of a block back. Returns the time when the recomputation of the block may begin."""
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
    work: Work, setup: Setup, machine: Machine, ring: CollectiveRing, timeline: Timeline
) -> CheckpointTime | None:
    """None if checkpoints stay on the device that made them."""
    options = setup.activations
    moves = setup.checkpointing and options is not None and (options.partition or options.offload)
    return CheckpointTime(work, setup, machine, ring, timeline) if moves else None
