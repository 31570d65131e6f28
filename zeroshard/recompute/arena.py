"""One contiguous block of device memory for tensors that live long among many that do not (ZeRO's M_D).

Checkpoints are kept from forward to backward, and reduced gradients from backward to step. Between them torch's
allocator makes and frees what each operator needs, and can be left with free memory in pieces that are too small. Here
the long-lived ones have a place of their own, as large as the first step shows that it must be: what comes and goes in
it is placed in a space without end, and as far as that was used the block reaches. So a step that takes and gives back
the same in the same order has room, gaps between pieces included.
"""

from __future__ import annotations

import bisect
import warnings
from collections import deque

import torch
from torch import Tensor

from ..config.layout import round_up

BOUNDARY = 512
"""Every tensor starts at a multiple of this many bytes, as in torch's allocator."""
WITHOUT_END = 1 << 62
"""Bytes of a space that is never full."""


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
        self.reached = 0
        """The furthest that anything ever taken ended."""

    def take(self, size: int) -> int | None:
        """Where so many bytes are free; None if nowhere."""
        for index, (start, free) in enumerate(self._free):
            if free >= size:
                rest = [(start + size, free - size)] if free > size else []
                self._free[index : index + 1] = rest
                self.reached = max(self.reached, start + size)
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
    def taken(self) -> int:
        """Bytes that are not free."""
        return self.size - sum(size for _, size in self._free)

    @property
    def largest(self) -> int:
        """The largest free range."""
        return max((size for _, size in self._free), default=0)


class Slot:
    """A tensor's place in the arena, or memory of its own while the arena has none. Given back with ``free()``."""

    def __init__(self, arena: DeviceArena, tensor: Tensor, space: Space, start: int, *, in_arena: bool) -> None:
        self.tensor: Tensor | None = tensor
        self.in_arena = in_arena
        """Whether it has a place there, rather than memory of its own."""
        self._arena, self._space, self._start = arena, space, start

    def free(self) -> None:
        """Gives the place back. Nothing may use the tensor after."""
        if self.tensor is None:
            return
        size, self.tensor = padded(self.tensor.nbytes), None
        self._arena.returned.append((self._space, self._start, size))


def padded(exact: int) -> int:
    """Bytes that a piece takes."""
    return round_up(max(exact, 1), BOUNDARY)


class DeviceArena:
    """Places for long-lived tensors. It is sized by what the first step needs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[tuple[Space, Tensor]] = []
        self._wanted = Space(WITHOUT_END)
        """Where this step's tensors without a place would lie, had there been a block for them."""
        self.returned: deque[tuple[Space, int, int]] = deque()
        """Places that are to be free again: a finalizer may give one back in the midst of ``take``."""
        self._alive = self._most = self._most_before = 0
        """Bytes alive; the most of them since the last step, and in all steps before."""

    @property
    def size(self) -> int:
        """Bytes of all blocks."""
        return sum(space.size for space, _ in self._blocks)

    @property
    def tensors(self) -> list[Tensor]:
        """The blocks, for the memory ledger."""
        return [block for _, block in self._blocks]

    @property
    def homeless(self) -> int:
        """Bytes alive that have no place."""
        self._free_returned()
        return self._alive - sum(space.taken for space, _ in self._blocks)

    def take(self, numel: int, dtype: torch.dtype) -> Slot:
        """Room for so many elements."""
        self._free_returned()
        exact = numel * dtype.itemsize
        size = padded(exact)
        for space, block in self._blocks:
            start = space.take(size)
            if start is not None:
                slot = Slot(self, block[start : start + exact].view(dtype), space, start, in_arena=True)
                break
        else:
            tensor = torch.empty(numel, dtype=dtype, device=self._device)
            start = self._wanted.take(size)
            assert start is not None
            slot = Slot(self, tensor, self._wanted, start, in_arena=False)
        self._alive += size
        self._most = max(self._most, self._alive)
        return slot

    def _free_returned(self) -> None:
        while self.returned:
            space, start, size = self.returned.popleft()
            space.give_back(start, size)
            self._alive -= size

    def settle(self, step: int) -> None:
        """After a step, when little is alive: makes room for what had none."""
        self._free_returned()
        missing, self._wanted = self._wanted.reached, Space(WITHOUT_END)
        most, self._most = self._most, self._alive
        before, self._most_before = self._most_before, max(self._most_before, most)
        if not missing:
            return
        if self._blocks:
            why, remedy = "were too little for", "; begin with the largest batch to have one"
            if most <= before:  # nothing that a user could do about it
                why, remedy = "had only gaps between pieces of other sizes for", ""
            warnings.warn(
                f"arena: {self.size / 2**20:.1f} MiB, which earlier steps took, {why} step {step}, so it grew by "
                f"{missing / 2**20:.1f} MiB, in a block of its own{remedy}",
                stacklevel=2,
            )
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what the first step took piece by piece
        self._blocks.append((Space(missing), torch.empty(missing, dtype=torch.uint8, device=self._device)))
