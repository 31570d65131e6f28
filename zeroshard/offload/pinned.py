"""Host memory: blocks of exact size, and rings of buffers that flats use in turn.

A block is pinned if a GPU copies to it or from it. Torch's own pinned allocator is not used: it rounds every size up to
a power of two, which can double the memory of a model.
"""

from __future__ import annotations

import mmap
import os
import queue
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..system.sizes import size_text
from .worker import POLL_SECONDS

ALIGNMENT = 128
"""Buffers start at multiples of this many bytes, so that no two buffers share a cache line."""


def aligned(size: int) -> int:
    """A size in bytes, rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class HostBlock:
    """One block of host memory that buffers are cut from, one after the other.

    >>> block = HostBlock(aligned(3 * 4), pinned=False)
    >>> block.take(3, torch.float32).tolist()
    [0.0, 0.0, 0.0]
    """

    def __init__(self, size: int, *, pinned: bool, dry: bool = False) -> None:
        self.size = size
        self._used = 0
        if dry:  # a shape without memory
            self.memory = torch.empty(size, dtype=torch.uint8, device="cpu")
            return
        # Anonymous pages are zero at first. Huge pages save the update half of its address translations.
        self._pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        # A forked child (of a data loader) does not need this memory. If it had the memory, every page that is
        # written afterwards would be copied first.
        if hasattr(mmap, "MADV_DONTFORK"):
            self._pages.madvise(mmap.MADV_DONTFORK)
        self.memory = torch.frombuffer(self._pages, dtype=torch.uint8)
        if pinned and size:
            _pin(self.memory)
            weakref.finalize(self, _unpin, self.memory, os.getpid())

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next buffer, of zeros."""
        size = numel * dtype.itemsize
        assert self._used + size <= self.size, "more was taken from the block than its size"
        taken = self.memory[self._used : self._used + size].view(dtype)
        self._used += aligned(size)
        return taken


def _pin(memory: Tensor) -> None:
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error) != 0:
        raise ValueError(
            f"offload: {size_text(memory.nbytes)} of host memory could not be pinned (CUDA error {int(error)}); "
            "raise the limit of locked memory (ulimit -l), or keep a part on the device with host_fraction="
        )


def _unpin(memory: Tensor, process: int) -> None:
    if os.getpid() != process:
        return
    torch.cuda.synchronize()  # a copy may still use the memory
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


@dataclass(eq=False)
class Staging:
    """A buffer of a ring while it is in use."""

    ring: BufferRing
    block: Tensor
    tensor: Tensor
    """The beginning of the block, as elements of the dtype asked for."""
    free_after: torch.cuda.Event | None
    """The end of the copy that last read the buffer. Nothing may be written before."""
    arrival: torch.cuda.Event | None = None
    """The end of the copy into the buffer."""

    def release(self, free_after: torch.cuda.Event | None) -> None:
        """Gives the buffer back. It may be written again after ``free_after``."""
        self.ring.free.put((self.block, free_after))


class BufferRing:
    """A fixed number of buffers that are used in turn. ``check`` raises if the thread that uses them has failed."""

    def __init__(self, blocks: Sequence[Tensor], check: Callable[[], None]) -> None:
        self._check = check
        self.free: queue.SimpleQueue[tuple[Tensor, torch.cuda.Event | None]] = queue.SimpleQueue()
        for block in blocks:
            self.free.put((block, None))

    def acquire(self, dtype: torch.dtype, numel: int) -> Staging:
        """The buffer that has been free the longest. Waits while all are in use."""
        while True:
            try:
                block, event = self.free.get(timeout=POLL_SECONDS)
                return Staging(self, block, block[: numel * dtype.itemsize].view(dtype), event)
            except queue.Empty:
                self._check()  # after a failure no buffer comes back
