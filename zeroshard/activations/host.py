"""Host memory that checkpoints wait in: slots of exact size, pinned where a GPU copies, and used again."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from .. import machine
from ..offload.arena import Arena, aligned


class HostPool:
    """Slots by size. A step takes as many as the one before, so that after the first nothing is allocated or pinned."""

    def __init__(self, device: torch.device, local_ranks: int) -> None:
        self._pinned = device.type == "cuda"
        self._local_ranks = local_ranks
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self.arenas: list[Arena] = []
        """Each holds one slot, and what is pinned stays so as long as it is there."""
        self.bytes = 0
        """Allocated so far."""

    def take(self, size: int, *, dry: bool = False) -> Tensor:
        """A slot of so many bytes; in a dry run one without memory."""
        size = aligned(size)
        if self._free[size]:
            return self._free[size].pop()
        room = machine.available_memory() // self._local_ranks
        if size > room and not dry:
            raise RuntimeError(
                f"activations.offload: a checkpoint of {size / 2**30:.2f} GiB does not fit the host, where this rank "
                f"may use {room / 2**30:.2f} GiB more and has taken {self.bytes / 2**30:.2f} GiB; use a smaller batch, "
                "or leave offload out"
            )
        self.bytes += size
        self.arenas.append(Arena(size, pinned=self._pinned, dry=dry))
        return self.arenas[-1].take(size, torch.uint8)

    def give_back(self, slot: Tensor) -> None:
        """Copies that still read the slot come before the next that writes it, for all go through one stream."""
        self._free[slot.nbytes].append(slot)
