"""The memory of tensors as bytes, for reading and writing files."""

from __future__ import annotations

import ctypes
import os

from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor. The tensor must outlive the view."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def read_into(tensor: Tensor, descriptor: int, place: int) -> int:
    """Fills a contiguous CPU tensor from a file, from byte ``place`` on. Returns how many bytes the file lacks."""
    rest = bytes_of(tensor)
    while rest and (count := os.preadv(descriptor, [rest], place)):
        rest, place = rest[count:], place + count
    return len(rest)
