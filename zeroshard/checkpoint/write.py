"""Writes one rank's ranges, streaming: no copy of a shard is made, and checksums are found on the way."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .boxes import Region
from .format import CHUNK, Entry, Part, data_file, header_of, part_file


class Held(NamedTuple):
    """A range that this rank has to write, and how to get at its elements."""

    name: str
    kind: str
    shape: tuple[int, ...]
    region: Region
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """The elements, 1-D, contiguous and of that dtype, on any device. Asked for once, in order."""

    @property
    def nbytes(self) -> int:
        return self.region.numel * self.dtype.itemsize


def write_part(
    folder: Path, token: str, rank: int, held: Sequence[Held], scalars: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """Writes a rank's data file, then its part of the index. Each is on the disk when this returns."""
    entries: list[Entry] = []
    offset = 0
    for piece in held:
        entries.append(Entry(piece.name, piece.kind, piece.shape, piece.region, piece.dtype, offset))
        offset += piece.nbytes
    header = header_of(entries, token, rank)
    with open(folder / data_file(rank), "wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(header))
        staging: Tensor | None = None
        for place, piece in enumerate(held):
            values_here = piece.read().detach().reshape(-1)
            assert values_here.dtype is piece.dtype, f"{piece.name} ({piece.kind}) is {values_here.dtype}"
            assert values_here.numel() == piece.region.numel, f"{piece.name} ({piece.kind}): {values_here.numel()}"
            if values_here.is_cuda and staging is None:
                staging = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True)
            checksums = tuple(_write_chunk(file.fileno(), chunk) for chunk in _chunks(values_here, staging))
            entries[place] = entries[place].with_checksums(checksums)
        os.fsync(file.fileno())
    part = Part(rank, len(header) + offset, len(header), tuple(entries), scalars, values)
    write_json(folder / part_file(rank), json.dumps(part.to_json(token), separators=(",", ":")).encode())


def _chunks(values: Tensor, staging: Tensor | None) -> Iterator[memoryview]:
    raw = values.contiguous().view(torch.uint8) if values.numel() else values.new_empty(0, dtype=torch.uint8)
    for start in range(0, raw.numel(), CHUNK):
        chunk = raw[start : start + CHUNK]
        if chunk.is_cuda:
            assert staging is not None
            chunk = staging[: chunk.numel()].copy_(chunk)
        yield bytes_of(chunk)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor. The tensor must outlive the view."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _write_chunk(descriptor: int, chunk: memoryview) -> int:
    checksum = zlib.crc32(chunk)
    _write_all(descriptor, chunk)
    return checksum


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def write_json(file: Path, text: bytes) -> None:
    """Writes a small file whole or not at all, and so that a crash does not undo it."""
    temporary = file.with_name(f".{file.name}.tmp")
    with open(temporary, "wb") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(temporary, file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Makes names in a folder as durable as the files: a rename is lost in a crash otherwise."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot, and need not
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
