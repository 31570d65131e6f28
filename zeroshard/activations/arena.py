"""One contiguous block of device memory for tensors that live long among many that do not (ZeRO's M_D).

Checkpoints are kept from forward to backward, and reduced gradients from backward to step. Between them torch's
allocator makes and frees what each operator needs, and can be left with free memory in pieces that are too small. Here
the long-lived ones have a place of their own, as large as the first step shows that it must be.
"""

from __future__ import annotations

import bisect
import warnings

import torch
from torch import Tensor

from ..layout import round_up

BOUNDARY = 512
"""Every tensor starts at a multiple of this many bytes, as in torch's allocator."""


class Space:
    """Which ranges of a block are free: first fit, and neighbours that become free are joined.

    >>> space = Space(1024)
    >>> first, second = space.take(512), space.take(512)
    >>> space.give_back(first, 512)
    >>> first, second, space.take(1024), space.largest
    (0, 512, None, 512)
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)] if size else []
        """Start and size of each free range, in order."""

    def take(self, size: int) -> int | None:
        """Where so many bytes are free; None if nowhere."""
        for index, (start, free) in enumerate(self._free):
            if free >= size:
                rest = [(start + size, free - size)] if free > size else []
                self._free[index : index + 1] = rest
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """Makes a range free again."""
        index = bisect.bisect(self._free, (start, size))
        if index < len(self._free) and start + size == self._free[index][0]:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            start, before = self._free.pop(index - 1)
            size, index = size + before, index - 1
        self._free.insert(index, (start, size))

    @property
    def largest(self) -> int:
        """The largest free range."""
        return max((size for _, size in self._free), default=0)


class Slot:
    """A tensor's place in the arena, or memory of its own while the arena has none. Given back with ``free()``."""

    def __init__(self, arena: DeviceArena, tensor: Tensor, place: tuple[Space, int] | None) -> None:
        self.tensor: Tensor | None = tensor
        self._size = round_up(max(tensor.nbytes, 1), BOUNDARY)
        self._arena, self._place = arena, place

    @property
    def in_arena(self) -> bool:
        """Whether it has a place there, rather than memory of its own."""
        return self._place is not None

    def free(self) -> None:
        """Gives the place back. Nothing may use the tensor after."""
        if self.tensor is None:
            return
        self.tensor = None
        if self._place is None:
            self._arena.homeless -= self._size
        else:
            space, start = self._place
            space.give_back(start, self._size)


class DeviceArena:
    """Places for long-lived tensors. It is sized by what the first step needs at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[tuple[Space, Tensor]] = []
        self.homeless = 0
        """Bytes alive that have no place."""
        self._missing = 0
        """The most of them since the last step."""

    @property
    def size(self) -> int:
        """Bytes of all blocks."""
        return sum(space.size for space, _ in self._blocks)

    @property
    def tensors(self) -> list[Tensor]:
        """The blocks, for the memory ledger."""
        return [block for _, block in self._blocks]

    def take(self, numel: int, dtype: torch.dtype) -> Slot:
        """Room for so many elements."""
        exact = numel * dtype.itemsize
        size = round_up(max(exact, 1), BOUNDARY)
        for space, block in self._blocks:
            start = space.take(size)
            if start is not None:
                return Slot(self, block[start : start + exact].view(dtype), (space, start))
        self.homeless += size
        self._missing = max(self._missing, self.homeless)
        return Slot(self, torch.empty(numel, dtype=dtype, device=self._device), None)

    def settle(self, step: int) -> None:
        """After a step, when little is alive: makes room for what had none."""
        missing, self._missing = self._missing, self.homeless
        if not missing:
            return
        if self._blocks:
            warnings.warn(
                f"arena: {self.size / 2**20:.1f} MiB, which earlier steps took, were too little for step {step}, so it "
                f"grew by {missing / 2**20:.1f} MiB, in a block of its own; begin with the largest batch to have one",
                stacklevel=2,
            )
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what the first step took piece by piece
        self._blocks.append((Space(missing), torch.empty(missing, dtype=torch.uint8, device=self._device)))
