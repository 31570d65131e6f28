"""Host memory: blocks of exact size, pinned where a GPU copies from and to them, and buffers that flats share in turn.

torch's pinned allocator rounds every block up to a power of two, which can double what a model takes.
"""

from __future__ import annotations

import mmap
import os
import queue
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .worker import POLL_SECONDS

ALIGNMENT = 128
"""Buffers start at multiples of this many bytes, so that no two share a cache line."""


def aligned(size: int) -> int:
    """A size in bytes, rounded up to where the next buffer may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Block:
    """One block of host memory that buffers are cut from, one after the other.

    >>> block = Block(aligned(3 * 4), pinned=False)
    >>> block.take(3, torch.float32).tolist()
    [0.0, 0.0, 0.0]
    """

    def __init__(self, size: int, *, pinned: bool, dry: bool = False) -> None:
        self.size = size
        self._used = 0
        if dry:  # a shape without memory
            self.memory = torch.empty(size, dtype=torch.uint8)
            return
        # Anonymous pages come zeroed, and huge ones spare the update half of its address translations.
        self._pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        # A forked child (a data loader's) has no use for it, and would make every page be copied that is written to.
        if hasattr(mmap, "MADV_DONTFORK"):
            self._pages.madvise(mmap.MADV_DONTFORK)
        self.memory = torch.frombuffer(self._pages, dtype=torch.uint8)
        if pinned and size:
            _pin(self.memory)
            weakref.finalize(self, _unpin, self.memory, os.getpid())

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next buffer, of zeros."""
        size = numel * dtype.itemsize
        assert self._used + size <= self.size, "more was taken from the block than was counted for it"
        taken = self.memory[self._used : self._used + size].view(dtype)
        self._used += aligned(size)
        return taken


def _pin(memory: Tensor) -> None:
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error) != 0:
        raise ValueError(
            f"offload: {memory.nbytes / 2**30:.1f} GiB of host memory could not be pinned (CUDA error {int(error)}); "
            "raise the limit of locked memory (ulimit -l), or keep a part on the device with host_fraction="
        )


def _unpin(memory: Tensor, process: int) -> None:
    if os.getpid() != process:
        return
    torch.cuda.synchronize()  # a copy may still read it
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class Staging:
    """A buffer of the ring while somebody has it."""

    def __init__(self, ring: Ring, block: Tensor, tensor: Tensor, free_after: torch.cuda.Event | None) -> None:
        self.tensor = tensor
        self.free_after = free_after
        """When the copy that last read it is over."""
        self.arrival: torch.cuda.Event | None = None
        self._ring, self._block = ring, block

    def wait(self) -> None:
        """Waits until what was copied into it is there."""
        if self.arrival is not None:
            self.arrival.synchronize()

    def release(self, free_after: torch.cuda.Event | None) -> None:
        """Gives it back, to be written when an event has passed."""
        self._ring.give_back(self._block, free_after)


class Ring:
    """Hands buffers out, and waits where all are taken; ``check`` raises if whoever has them has failed."""

    def __init__(self, blocks: Sequence[Tensor], check: Callable[[], None]) -> None:
        self._check = check
        self._free: queue.SimpleQueue[tuple[Tensor, torch.cuda.Event | None]] = queue.SimpleQueue()
        self._filled: dict[object, Staging] = {}
        for block in blocks:
            self._free.put((block, None))

    def acquire(self, dtype: torch.dtype, numel: int) -> Staging:
        """The buffer that is free the longest, as so many elements."""
        while True:
            try:
                block, event = self._free.get(timeout=POLL_SECONDS)
                break
            except queue.Empty:
                self._check()  # nobody will give one back if the update has failed
        return Staging(self, block, block[: numel * dtype.itemsize].view(dtype), event)

    def give_back(self, block: Tensor, event: torch.cuda.Event | None) -> None:
        """By ``Staging.release``."""
        self._free.put((block, event))

    def put(self, owner: object, staging: Staging) -> None:
        """Keeps a buffer that was filled ahead of need."""
        self._filled[owner] = staging

    def take(self, owner: object) -> Staging | None:
        """The buffer that was filled for an owner, if any."""
        return self._filled.pop(owner, None)
