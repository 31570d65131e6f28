"""Where the checkpoints of one model wait, and the copies to the host that are under way."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from ..comm import parallel
from ..comm.fabric import Fabric
from ..comm.lane import Pending, wait_on_host
from ..config.bounds import ON_THEIR_WAY
from ..config.options import Activations
from ..system import compat, trace
from .host_pool import HostPool, HostSlot

CHANGED_LATER = "the model changed an input of a checkpointed block in place, after the block's call"


class VersionWatch:
    """A tensor and its version, to see later whether the tensor was changed in place."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._version = tensor, compat.version(tensor)

    def check(self, change: str = CHANGED_LATER) -> None:
        """Raises if the tensor was changed; ``change`` says who did it."""
        if compat.version(self.tensor) != self._version:
            raise RuntimeError(
                f"{change}, so the block cannot be recomputed from it; use a copy, as in x = x + block(x)"
            )


@dataclass(frozen=True, eq=False)
class _CopyToHost:
    """A copy that may still be under way, and the tensors that it needs until then."""

    pending: Pending
    source: Tensor
    slot: HostSlot
    watch: VersionWatch


class CheckpointStore:
    """The options, the lane and the host memory that all checkpoints of one model share."""

    def __init__(self, options: Activations, fabric: Fabric) -> None:
        self.options, self.fabric = options, fabric
        self.host = HostPool(fabric.device, fabric.local_ranks) if options.offload else None
        self._copies: deque[_CopyToHost] = deque()
        self.traffic: Counter[str] = Counter()
        """Bytes copied to the host and to the device since ``take_traffic`` was last called."""

    def parts_of(self, tensor: Tensor) -> int:
        """How many ranks divide a checkpoint. A DTensor that is divided already is not divided again."""
        return self.fabric.model.world if self.options.partition and not parallel.divided(tensor) else 1

    def send(self, source: Tensor, watch: VersionWatch) -> HostSlot:
        """Copies a tensor to the host. The store refers to the tensor until the copy is done."""
        assert self.host is not None
        slot = self.host.take(source.nbytes, dry=compat.is_fake(source))
        target = slot.memory[: source.nbytes].view(source.dtype)
        pending = self.fabric.model.run(lambda: target.copy_(source, non_blocking=True))
        self._copies.append(_CopyToHost(pending, source, slot, watch))
        self.traffic[trace.DOWN] += source.nbytes
        self.finish_copies(ON_THEIR_WAY)
        return slot

    def finish_copies(self, at_most: int = 0) -> None:
        """Makes the current stream wait until at most ``at_most`` copies to the host are left."""
        while len(self._copies) > at_most:
            copy = self._copies.popleft()
            copy.pending.wait()
            copy.watch.check()

    def give_back(self, slot: HostSlot) -> None:
        """Frees a slot that nobody will read. A finalizer calls this, on any thread and at any time."""
        assert self.host is not None
        for copy in list(self._copies):
            if copy.slot is slot:
                wait_on_host(copy.pending)
                with suppress(ValueError):  # another thread has removed it
                    self._copies.remove(copy)
        self.host.give_back(slot)

    def take_traffic(self) -> dict[str, int]:
        """Bytes that were copied since the last call; empty where checkpoints stay on the device."""
        taken, self.traffic = self.traffic, Counter()
        return dict(taken)
