"""Host memory in blocks of exact size, pinned where a GPU copies from and to it.

torch's pinned allocator rounds every block up to a power of two, which can double what a model takes.
"""

from __future__ import annotations

import mmap
import os
import weakref

import torch
from torch import Tensor

ALIGNMENT = 128
"""Buffers start at multiples of this many bytes, so that no two share a cache line."""


def aligned(size: int) -> int:
    """A size in bytes, rounded up to where the next buffer may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Arena:
    """One block of host memory that buffers are cut from, one after the other.

    >>> arena = Arena(aligned(3 * 4), pinned=False)
    >>> arena.take(3, torch.float32).tolist()
    [0.0, 0.0, 0.0]
    """

    def __init__(self, size: int, *, pinned: bool, dry: bool = False) -> None:
        self.size = size
        self._used = 0
        if dry:  # a shape without memory
            self.block = torch.empty(size, dtype=torch.uint8)
            return
        # Anonymous pages come zeroed, and huge ones spare the update half of its address translations.
        self._memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        # A forked child (a data loader's) has no use for it, and would make every page be copied that is written to.
        if hasattr(mmap, "MADV_DONTFORK"):
            self._memory.madvise(mmap.MADV_DONTFORK)
        self.block = torch.frombuffer(self._memory, dtype=torch.uint8)
        if pinned and size:
            _pin(self.block)
            weakref.finalize(self, _unpin, self.block, os.getpid())

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next buffer, of zeros."""
        size = numel * dtype.itemsize
        assert self._used + size <= self.size, "more was taken from the arena than was counted for it"
        taken = self.block[self._used : self._used + size].view(dtype)
        self._used += aligned(size)
        return taken


def _pin(block: Tensor) -> None:
    error = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0)
    if int(error) != 0:
        raise ValueError(
            f"offload: {block.nbytes / 2**30:.1f} GiB of host memory could not be pinned (CUDA error {int(error)}); "
            "raise the limit of locked memory (ulimit -l), or keep a part on the device with host_fraction="
        )


def _unpin(block: Tensor, process: int) -> None:
    if os.getpid() != process:
        return
    torch.cuda.synchronize()  # a copy may still read it
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
