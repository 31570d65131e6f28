"""Copies what is to be written into host memory, so that training can go on while it is written."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ..comm.fabric import Fabric
from ..offload.pinned import Block, aligned
from ..system import compat, machine
from .contents import Contents
from .write import Held

RESERVE = 1 << 28
"""Bytes of host memory that a snapshot leaves to others."""


class Snapshots:
    """Host memory for one snapshot at a time. It is kept: to get and pin it anew would cost more than to fill it."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._block: Block | None = None
        self.memory: Tensor | None = None

    def size(self, contents: Contents) -> int:
        """Bytes of host memory that a snapshot takes, those included that it needs while it is taken."""
        return _size(contents) + contents.joined_bytes

    def lacking(self, contents: Contents) -> int:
        """Bytes that this rank has too few; at most 0 if there is room."""
        held = 0 if self.memory is None else self.memory.numel()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self._fabric.world))
        return self.size(contents) - held - (machine.available_memory() - RESERVE) // local

    def allocate(self, contents: Contents) -> str | None:
        """Gets the memory; why there is none."""
        size = _size(contents)
        if self.memory is None or self.memory.numel() < size:
            self.give_back()
            try:
                self._block = Block(size, pinned=self._fabric.device.type == "cuda")
                self.memory = self._block.take(size, torch.uint8)
            except Exception as error:  # pinned memory has limits of its own, that no count of free bytes shows
                return f"{type(error).__name__}: {error}"
        return None

    def give_back(self) -> None:
        self.memory = self._block = None

    def take(self, contents: Contents) -> Contents:
        """The same contents, in memory that training does not touch; ``allocate`` has got it."""
        assert self.memory is not None
        with compat.label("zeroshard.save snapshot"):
            offset, held = 0, []
            for piece in contents.held:
                target = self.memory[offset : offset + piece.nbytes].view(piece.dtype)
                target.copy_(piece.read(), non_blocking=True)
                held.append(Held(piece.name, piece.kind, piece.shape, piece.region, piece.dtype, _Copy(target)))
                offset += aligned(piece.nbytes)
            if self._fabric.device.type == "cuda":
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
