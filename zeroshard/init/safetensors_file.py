"""Reads safetensors files: a header that is checked in every field, and ranges of elements.

Elements are read, never mapped. If a mapped file becomes shorter, for example because somebody copies another one over
it, the next access to its memory kills the process. A read returns fewer bytes, which is an error that names the file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ..system.memory import read_into
from ..system.parse import LARGEST_JSON, parse_json
from ..system.words import quoted

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes whose elements can be read. A header may have others."""
LENGTH_BYTES = 8
METADATA = "__metadata__"
MOST_DIMENSIONS = 64
"""Dimensions that torch itself allows."""


class DiskTensor(NamedTuple):
    """A tensor on disk."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors writes it: F32, BF16, I64, ..."""
    offset: int
    """The tensor's first byte in the file."""


def read_header(file: Path) -> dict[str, DiskTensor]:
    """The tensors of a file, by name. Raises ValueError, which names the file, if the header makes no sense."""
    try:
        with open(file, "rb") as opened:
            return _tensors(file, *_read_table(opened))
    except (OSError, ValueError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise ValueError(f"{file} cannot be read as safetensors: {reason}") from error


def _read_table(opened: BinaryIO) -> tuple[Any, int, int]:
    """The JSON of a header, the header's bytes, and the file's bytes."""
    size = os.fstat(opened.fileno()).st_size
    length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
    if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, LARGEST_JSON):
        raise ValueError(f"it has {size} bytes, and begins with a header of {length} bytes")
    text = opened.read(length)
    if text[:1] != b"{":
        raise ValueError("its header is not JSON")
    return parse_json(text), LENGTH_BYTES + length, size


def _tensors(file: Path, table: Mapping[str, Any], start: int, size: int) -> dict[str, DiskTensor]:
    """The entries of a header. Together they must cover every byte of the data, each byte once."""
    found, ranges = {}, []
    for name, entry in table.items():
        if name == METADATA:
            continue
        try:
            shape, dtype = tuple(map(_count, entry["shape"])), entry["dtype"]
            begin, end = map(_count, entry["data_offsets"])
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            raise ValueError(f"the entry of {quoted(name)} is {quoted(entry)}") from None
        if not isinstance(dtype, str) or len(shape) > MOST_DIMENSIONS:
            raise ValueError(f"{quoted(name)} has dtype {quoted(dtype)} and shape {quoted(list(shape))}")
        known = DTYPES.get(dtype)
        if known is not None and math.prod(shape) * known.itemsize != end - begin:
            raise ValueError(f"{quoted(name)} has shape {quoted(list(shape))} in {dtype}, and {end - begin} bytes")
        found[name] = DiskTensor(file, name, shape, dtype, start + begin)
        ranges.append((begin, end, name))
    covered = 0
    for begin, end, name in sorted(ranges):
        if begin != covered or end < begin:
            raise ValueError(f"{quoted(name)} is at bytes {begin} to {end}, where {covered} comes next")
        covered = end
    if covered != size - start:
        raise ValueError(f"its tensors have {covered} bytes, and the file has {size - start} for them")
    return found


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError
    return value


class Elements:
    """The elements of the tensors in one file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._opened = open(file, "rb", buffering=0)  # noqa: SIM115

    def close(self) -> None:
        self._opened.close()

    def read(self, entry: DiskTensor, start: int, stop: int) -> Tensor:
        """A range of elements as a new 1-D tensor.

        Raises:
            ValueError: the file is shorter than it was when its header was read.
        """
        values = torch.empty(stop - start, dtype=DTYPES[entry.dtype], device="cpu")
        place = entry.offset + start * values.itemsize
        if lacking := read_into(values, self._opened.fileno(), place):
            raise ValueError(
                f"{self._file} became shorter while it was read: it ends at byte {place + values.nbytes - lacking}, "
                f"inside {quoted(entry.name)}"
            )
        return values
