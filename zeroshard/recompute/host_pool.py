"""Host memory for checkpoints: slots of exact size, pinned where a GPU copies to them, and used again.

Shapes may vary from step to step. So a checkpoint may use a free slot of up to twice its size. Before the pool grows
beyond the most that was ever needed at once, it gives free slots back to the system. It therefore never takes more than
twice that much.
"""

from __future__ import annotations

import bisect
from collections import deque
from operator import attrgetter

import torch

from ..offload.pinned import HostBlock, aligned
from ..system import machine
from ..system.sizes import size_text

MOST_WASTE = 2
"""A slot may be this many times as large as the checkpoint in it."""
_SIZE = attrgetter("size")


class HostSlot:
    """Host memory for one checkpoint. It stays pinned as long as this object lives."""

    def __init__(self, size: int, *, pinned: bool, dry: bool) -> None:
        self.size = size
        self._block = HostBlock(size, pinned=pinned, dry=dry)
        self.memory = self._block.take(size, torch.uint8)
        self.asked = 0
        """Bytes that the checkpoint in this slot asked for."""


class HostPool:
    """Slots of many sizes. A step uses the slots of the step before, so that only the first step allocates."""

    def __init__(self, device: torch.device, local_ranks: int) -> None:
        self._pinned = device.type == "cuda"
        self._local_ranks = local_ranks
        self.slots: list[HostSlot] = []
        """All slots, free or in use."""
        self._free: list[HostSlot] = []
        """Free slots, from small to large."""
        self._returned: deque[HostSlot] = deque()
        self._needed = self._peak = 0
        """Bytes that all checkpoints ask for now, and the most that they have asked for at a time."""

    @property
    def bytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.size for slot in self.slots)

    def take(self, size: int, *, dry: bool = False) -> HostSlot:
        """A slot for ``size`` bytes. In a dry run it has a shape and no memory."""
        while self._returned:
            slot = self._returned.popleft()
            self._needed -= slot.asked
            bisect.insort(self._free, slot, key=_SIZE)
        size = aligned(size)
        self._peak = max(self._peak, self._needed + size)
        slot = self._fitting(size) or self._new(size, dry)
        slot.asked = size
        self._needed += size
        return slot

    def _fitting(self, size: int) -> HostSlot | None:
        """The smallest free slot that is large enough; None if most of it would be wasted."""
        index = bisect.bisect_left(self._free, size, key=_SIZE)
        fits = index < len(self._free) and self._free[index].size <= MOST_WASTE * size
        return self._free.pop(index) if fits else None

    def _new(self, size: int, dry: bool) -> HostSlot:
        while self._free and self.bytes + size > self._peak:
            self.slots.remove(self._free.pop())  # unpinning it waits for copies that still use it
        room = machine.available_memory() // self._local_ranks
        if size > room and not dry:
            raise RuntimeError(
                f"activations.offload: a checkpoint of {size_text(size)} does not fit the host, where this rank "
                f"may use {size_text(room)} more and has taken {size_text(self.bytes)}; use a smaller batch, "
                "or leave offload out"
            )
        slot = HostSlot(size, pinned=self._pinned, dry=dry)
        self.slots.append(slot)
        return slot

    def give_back(self, slot: HostSlot) -> None:
        """Makes a slot free. The next copy to it runs on the same stream, so copies that still read it come first."""
        self._returned.append(slot)  # take() does the rest: a finalizer may call this in the middle of take()
