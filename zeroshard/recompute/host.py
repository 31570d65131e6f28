"""Host memory that checkpoints wait in: slots of exact size, pinned where a GPU copies, and used again.

Where shapes vary, a slot of up to twice the size asked for will do, and slots that nobody uses go before the pool grows
beyond what was ever needed at once. So it never holds more than twice that.
"""

from __future__ import annotations

import bisect
from collections import deque

import torch
from torch import Tensor

from ..offload.pinned import Block, aligned
from ..system import machine

MOST_WASTE = 2
"""A slot may be so many times the size asked for."""


class _Slot:
    """A block of host memory, which stays pinned as long as it is there."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.size = block.size
        self.tensor = block.take(block.size, torch.uint8)


def _size_of(slot: _Slot) -> int:
    return slot.size


class HostPool:
    """Slots of many sizes. A step takes those of the one before, so that after the first nothing is allocated."""

    def __init__(self, device: torch.device, local_ranks: int) -> None:
        self._pinned = device.type == "cuda"
        self._local_ranks = local_ranks
        self._free: list[_Slot] = []
        """From small to large."""
        self._taken: dict[int, tuple[_Slot, int]] = {}
        """By the address of their tensor's object: slots in use, and the bytes that were asked for."""
        self.bytes = 0
        """Allocated now."""
        self._returned: deque[Tensor] = deque()
        self._needed = self._peak = 0

    @property
    def blocks(self) -> list[Block]:
        """The memory of all slots."""
        return [slot.block for slot in (*self._free, *(slot for slot, _ in self._taken.values()))]

    def take(self, size: int, *, dry: bool = False) -> Tensor:
        """A slot of so many bytes; in a dry run one without memory."""
        while self._returned:
            entry, asked = self._taken.pop(id(self._returned.popleft()))
            self._needed -= asked
            bisect.insort(self._free, entry, key=_size_of)
        size = aligned(size)
        self._needed += size
        self._peak = max(self._peak, self._needed)
        try:
            slot = self._fitting(size) or self._new(size, dry)
        except BaseException:
            self._needed -= size
            raise
        self._taken[id(slot.tensor)] = (slot, size)
        return slot.tensor

    def _fitting(self, size: int) -> _Slot | None:
        """The smallest free slot that is large enough, and not so large that most of it would be wasted."""
        index = bisect.bisect_left(self._free, size, key=_size_of)
        fits = index < len(self._free) and self._free[index].size <= MOST_WASTE * size
        return self._free.pop(index) if fits else None

    def _new(self, size: int, dry: bool) -> _Slot:
        while self._free and self.bytes + size > self._peak:
            self.bytes -= self._free.pop().size  # what is pinned waits, when it goes, for copies that still use it
        room = machine.available_memory() // self._local_ranks
        if size > room and not dry:
            raise RuntimeError(
                f"activations.offload: a checkpoint of {size / 2**30:.2f} GiB does not fit the host, where this rank "
                f"may use {room / 2**30:.2f} GiB more and has taken {self.bytes / 2**30:.2f} GiB; use a smaller batch, "
                "or leave offload out"
            )
        slot = _Slot(Block(size, pinned=self._pinned, dry=dry))
        self.bytes += size
        return slot

    def give_back(self, slot: Tensor) -> None:
        """Copies that still read the slot come before the next that writes it, for all go through one stream."""
        self._returned.append(slot)  # no more than this: a finalizer may call it in the midst of take()
