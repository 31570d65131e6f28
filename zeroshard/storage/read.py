"""Reads elements out of a checkpoint into memory that is there already, checking every byte that is used."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .boxes import Overlap, Region, Strided, overlaps
from .format import CHUNK, CheckpointError, Entry, Part, data_file, header_of, tensor_kind
from .index import Index
from .plain import open_plain
from .write import bytes_of

KEPT_OPEN = 32
"""How many files are mapped at once: each takes a descriptor, and a run may have had more ranks than there are."""
KEPT_CHECKED = 4096
"""How many chunks are remembered as good, for a range that several pieces need."""


class Reader:
    """A checkpoint's data files, mapped when first needed."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._files: dict[int, Tensor] = {}
        self._good: dict[tuple[int, int], None] = {}

    def read(self, name: str, kind: str, region: Region, target: Tensor) -> None:
        """Fills a 1-D tensor, of any dtype and on any device, with the elements of a region."""
        for rank, entry in self.index.places[name, kind]:
            for overlap in overlaps(region, entry.region):
                self._copy(rank, entry, overlap, target)

    def whole(self, name: str, kind: str) -> Tensor:
        """All of a stored tensor, in its own dtype."""
        first = self.index.places[name, kind][0].entry
        flat = torch.empty(first.region.numel, dtype=first.dtype)
        self.read(name, kind, first.region, flat)
        return flat.reshape(first.shape)

    def tensor_of(self, rank: int, name: str) -> Tensor:
        """A tensor inside a rank's values."""
        for entry in self.index.parts[rank].entries:
            if (entry.name, entry.kind) == (name, tensor_kind(rank)):
                return self.whole(name, entry.kind)
        raise CheckpointError(f"{self.index.folder}: rank {rank} has no tensor {name!r}")

    def open(self, rank: int) -> Tensor:
        """The data of a rank's file, after its header, which is what the index says."""
        data = self._files.pop(rank, None)
        if data is None:
            while len(self._files) >= KEPT_OPEN:
                self._files.pop(next(iter(self._files)))  # the one not used for longest
            data = self._map(self.index.parts[rank])
        self._files[rank] = data
        return data

    def check_files(self) -> None:
        """Looks at every file's size and header, and reads no data."""
        for part in self.index.parts:
            with self._opened(part):
                pass

    @contextlib.contextmanager
    def _opened(self, part: Part) -> Iterator[BinaryIO]:
        """A rank's file, if its size and header are what the index says."""
        file = self.index.folder / data_file(part.rank)
        expected = header_of(part.entries, self.index.token, part.rank)
        try:
            with open_plain(file) as opened:
                size = os.fstat(opened.fileno()).st_size
                if size != part.size:
                    raise CheckpointError(f"{file} has {size} bytes instead of {part.size}: it is truncated or foreign")
                if opened.read(len(expected)) != expected:
                    opened.seek(0)
                    raise CheckpointError(f"{file} {_what_it_is(opened.read(1 << 16), self.index.token)}")
                yield opened
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error

    def _map(self, part: Part) -> Tensor:
        with self._opened(part) as opened:
            if part.size == part.header:
                return torch.empty(0, dtype=torch.uint8)
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # as torch wants it; never written
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=part.header)

    def _copy(self, rank: int, entry: Entry, overlap: Overlap, target: Tensor) -> None:
        start, stop = overlap.theirs.reach(overlap.shape)
        size = entry.dtype.itemsize
        if overlap.theirs.strides == (1,):  # chunk by chunk: what was just checked is still in the processor's cache
            step = CHUNK // size
            begin = start
            while begin < stop:
                end = min((begin // step + 1) * step, stop)
                source = self._elements(rank, entry, begin, end)
                mine = overlap.mine.offset + begin - start
                target[mine : mine + end - begin].copy_(source)
                begin = end
            return
        source = self._elements(rank, entry, start, stop)
        _view(target, overlap.shape, overlap.mine).copy_(
            _view(source, overlap.shape, Strided(0, overlap.theirs.strides))
        )

    def _elements(self, rank: int, entry: Entry, start: int, stop: int) -> Tensor:
        size = entry.dtype.itemsize
        self._check(rank, entry, start * size, stop * size)
        raw = self.open(rank)[entry.offset + start * size : entry.offset + stop * size]
        if (entry.offset + start * size) % size:  # the file's alignment is that of its widest dtypes, mostly
            raw = raw.clone()
        return raw.view(entry.dtype)

    def _check(self, rank: int, entry: Entry, start: int, stop: int) -> None:
        """Compares the checksums of the chunks that bytes from start to stop are in."""
        data = self.open(rank)
        for number in range(start // CHUNK, -(-stop // CHUNK)):
            key = (rank, entry.offset + number * CHUNK)
            if key in self._good:
                continue
            begin = entry.offset + number * CHUNK
            end = min(begin + CHUNK, entry.offset + entry.nbytes)
            if zlib.crc32(bytes_of(data[begin:end])) != entry.checksums[number]:
                raise CheckpointError(
                    f"{self.index.folder / data_file(rank)} is damaged: {entry.name!r} ({entry.kind}) has another "
                    f"checksum than when it was written, near byte {self.index.parts[rank].header + begin}"
                )
            if len(self._good) >= KEPT_CHECKED:
                self._good.pop(next(iter(self._good)))
            self._good[key] = None


def _view(values: Tensor, shape: tuple[int, ...], place: Strided) -> Tensor:
    return values.as_strided(shape, place.strides, values.storage_offset() + place.offset)


def _what_it_is(start: bytes, token: str) -> str:
    """What a file is whose head is not the expected one."""
    if start[:1] == b"\x80" or start[:2] == b"PK":
        return "is a pickle or an archive, not safetensors; such files are never loaded"
    try:
        length = int.from_bytes(start[:8], "little")
        table: Any = json.loads(start[8 : 8 + length])
        other = table["__metadata__"]["checkpoint"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "has a damaged header"
    return "belongs to another checkpoint" if other != token else "has another header than the index says"
