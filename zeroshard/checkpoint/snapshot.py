"""Copies what is to be written into host memory, so that training can go on while it is written."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from .. import compat, machine
from ..comm import Fabric
from ..offload.arena import Arena, aligned
from .contents import Contents
from .write import Held

RESERVE = 1 << 28
"""Bytes of host memory that a snapshot leaves to others."""


class Snapshots:
    """Host memory for one snapshot at a time. It is kept: to get and pin it anew would cost more than to fill it."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._arena: Arena | None = None
        self.memory: Tensor | None = None

    def room_for(self, contents: Contents) -> str | None:
        """Why there is no room on some rank; None if there is. Collective."""
        needed = _size(contents)
        held = 0 if self.memory is None else self.memory.numel()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self._fabric.world))
        available = held + (machine.available_memory() - RESERVE) // local
        lacking = self._fabric.maximum([needed - available])[0]
        if lacking <= 0:
            return None
        return f"a snapshot takes {needed / 2**30:.2f} GiB of host memory a rank, {lacking / 2**30:.2f} GiB too much"

    def take(self, contents: Contents) -> Contents:
        """The same contents, in memory that training does not touch."""
        size = _size(contents)
        cuda = self._fabric.device.type == "cuda"
        with compat.label("zeroshard.save snapshot"):
            if self.memory is None or self.memory.numel() < size:
                self.memory = self._arena = None
                self._arena = Arena(size, pinned=cuda)
                self.memory = self._arena.take(size, torch.uint8)
            offset, held = 0, []
            for piece in contents.held:
                target = self.memory[offset : offset + piece.nbytes].view(piece.dtype)
                target.copy_(piece.read(), non_blocking=True)
                held.append(Held(piece.name, piece.kind, piece.shape, piece.region, piece.dtype, _Copy(target)))
                offset += aligned(piece.nbytes)
            if cuda:
                torch.cuda.synchronize(self._fabric.device)
        return Contents(held, contents.scalars, contents.values)


class _Copy:
    """A range that was copied."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __call__(self) -> Tensor:
        return self._tensor


def _size(contents: Contents) -> int:
    return sum(aligned(piece.nbytes) for piece in contents.held)
