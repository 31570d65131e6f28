"""Reads a checkpoint: its index, then elements into memory that is there already. Checks every byte that is used."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from .format import (
    CHUNK,
    INDEX,
    LARGEST_JSON,
    MARKER,
    VALUE,
    VERSION,
    CheckpointError,
    Entry,
    Part,
    check_version,
    data_file,
    header_of,
    is_of_parameter,
    open_plain,
    read_marker,
    tensor_kind,
)
from .regions import BoxStrides, Overlap, Region, flaw, overlaps
from .write import bytes_of

OPEN_FILES = 32
"""Most files that are mapped at a time: each takes a descriptor, and a run may have more ranks than descriptors."""
REMEMBERED_CHUNKS = 4096
"""Chunks that are remembered as good, for a range that several pieces need."""


class Location(NamedTuple):
    """An entry, and the rank whose file it is in."""

    rank: int
    entry: Entry


class Index:
    """The index of a complete checkpoint."""

    def __init__(self, folder: Path, token: str, parts: Sequence[Part]) -> None:
        self.folder, self.token, self.parts = folder, token, tuple(parts)
        self.places: dict[tuple[str, str], list[Location]] = {}
        """Where the ranges are, by name and kind."""
        self.kinds: dict[str, list[str]] = {}
        """The kinds that are stored, by parameter."""
        self.scalars: dict[str, Any] = {}
        for part in parts:
            self.scalars |= part.scalars
            for entry in part.entries:
                self.places.setdefault((entry.name, entry.kind), []).append(Location(part.rank, entry))
        for name, kind in self.places:
            if is_of_parameter(kind):
                self.kinds.setdefault(name, []).append(kind)

    @property
    def file(self) -> Path:
        return self.folder / INDEX

    @property
    def values(self) -> Mapping[str, Any]:
        """The values that all ranks share."""
        return self.parts[0].values

    def shape(self, name: str, kind: str = VALUE) -> tuple[int, ...]:
        """The shape of a whole parameter or buffer."""
        return self.places[name, kind][0].entry.shape

    def dtype(self, name: str, kind: str = VALUE) -> torch.dtype:
        """The dtype in which a parameter, a state or a buffer is stored."""
        return self.places[name, kind][0].entry.dtype

    def check(self) -> None:
        """Every state of every parameter must be there, each element once. Raises ValueError."""
        for (name, kind), places in self.places.items():
            first = places[0].entry
            for _, entry in places:
                if (entry.shape, entry.dtype) != (first.shape, first.dtype):
                    raise ValueError(f"{name!r} ({kind}) is stored with two shapes or dtypes")
            if is_of_parameter(kind):
                if (name, VALUE) not in self.places:
                    raise ValueError(f"{name!r} ({kind}) belongs to a parameter that is not there")
                if first.shape != self.shape(name):
                    raise ValueError(f"{name!r} ({kind}) has shape {first.shape}, the parameter {self.shape(name)}")
            wrong = flaw(first.shape, [entry.region for _, entry in places])
            if wrong is not None:
                raise ValueError(f"{name!r} ({kind}): {wrong}")


def index_json(token: str, parts: Sequence[Mapping[str, Any]]) -> bytes:
    """The file of an index, from the JSON of its parts."""
    return json.dumps({"version": VERSION, "checkpoint": token, "parts": parts}, separators=(",", ":")).encode()


def read_index(folder: Path) -> Index:
    """Reads and checks the index of a complete checkpoint. Reads no data.

    Raises:
        CheckpointError: there is no marker, or the index is damaged or makes no sense.
    """
    marker = read_marker(folder)
    if marker is None:
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MARKER}")
    file = folder / INDEX
    if marker.index_bytes > LARGEST_JSON:
        raise CheckpointError(f"{folder / MARKER} speaks of an index of {marker.index_bytes} bytes")
    try:
        with open_plain(file) as opened:
            text = opened.read(marker.index_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if len(text) != marker.index_bytes or hashlib.sha256(text).hexdigest() != marker.index_sha256:
        raise CheckpointError(f"{file} is not the one that {MARKER} was written for: it is damaged or foreign")
    try:
        return _index_from(folder, json.loads(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is no index: {type(error).__name__}: {error}") from error


def _index_from(folder: Path, value: Any) -> Index:
    check_version(value)
    token = value["checkpoint"]
    if not isinstance(token, str) or not re.fullmatch("[0-9a-f]{1,64}", token):
        raise ValueError(f"{token!r} names no checkpoint")
    parts = [Part.from_json(part) for part in value["parts"]]
    if not parts or [part.rank for part in parts] != list(range(len(parts))):
        raise ValueError("its parts are not those of ranks 0, 1, 2 and so on")
    index = Index(folder, token, parts)
    index.check()
    return index


class CheckpointReader:
    """The data of a checkpoint. A file is mapped when it is first needed."""

    def __init__(self, index: Index) -> None:
        self.index = index
        data = lru_cache(OPEN_FILES)(partial(_map, index))
        self._data = data
        self._check = lru_cache(REMEMBERED_CHUNKS)(partial(_check_chunk, index, data))

    def read(self, name: str, kind: str, region: Region, target: Tensor) -> None:
        """Fills a 1-D tensor, of any dtype and on any device, with the elements of a region."""
        for rank, entry in self.index.places[name, kind]:
            for overlap in overlaps(region, entry.region):
                self._copy(rank, entry, overlap, target)

    def tensor_of(self, rank: int, name: str) -> Tensor:
        """A tensor inside a rank's values, in the dtype in which it is stored."""
        for entry in self.index.parts[rank].entries:
            if (entry.name, entry.kind) == (name, tensor_kind(rank)):
                flat = torch.empty(entry.region.numel, dtype=entry.dtype, device="cpu")
                self.read(name, entry.kind, entry.region, flat)
                return flat.reshape(entry.shape)
        raise CheckpointError(f"{self.index.folder}: rank {rank} has no tensor {name!r}")

    def check_files(self) -> None:
        """Checks the size and the header of every file. Reads no data."""
        for part in self.index.parts:
            with _opened(self.index, part):
                pass

    def _copy(self, rank: int, entry: Entry, overlap: Overlap, target: Tensor) -> None:
        start, stop = overlap.theirs.offset, overlap.theirs.end(overlap.shape)
        if overlap.theirs.strides != (1,):
            source = self._elements(rank, entry, start, stop)
            _view(target, overlap.shape, overlap.mine).copy_(
                _view(source, overlap.shape, BoxStrides(0, overlap.theirs.strides))
            )
            return
        step = CHUNK // entry.dtype.itemsize
        into = overlap.mine.offset - start
        while start < stop:  # chunk by chunk: what was just checked is still in the processor's cache
            end = min((start // step + 1) * step, stop)
            target[into + start : into + end].copy_(self._elements(rank, entry, start, end))
            start = end

    def _elements(self, rank: int, entry: Entry, start: int, stop: int) -> Tensor:
        first, last = start * entry.dtype.itemsize, stop * entry.dtype.itemsize
        for number in range(first // CHUNK, -(-last // CHUNK)):
            self._check(rank, entry, number)
        return self._data(rank)[entry.offset + first : entry.offset + last].view(entry.dtype)


def _map(index: Index, rank: int) -> Tensor:
    """The data of a rank's file, without the header."""
    part = index.parts[rank]
    with _opened(index, part) as opened:
        if part.size == part.header:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # as torch wants it; never written
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=part.header)


def _check_chunk(index: Index, data: Any, rank: int, entry: Entry, number: int) -> None:
    """Compares the checksum of one chunk of a range."""
    begin = entry.offset + number * CHUNK
    end = min(begin + CHUNK, entry.offset + entry.nbytes)
    if zlib.crc32(bytes_of(data(rank)[begin:end])) != entry.checksums[number]:
        raise CheckpointError(
            f"{index.folder / data_file(rank)} is damaged: {entry.name!r} ({entry.kind}) has another checksum than "
            f"when it was written, near byte {index.parts[rank].header + begin}"
        )


@contextlib.contextmanager
def _opened(index: Index, part: Part) -> Iterator[BinaryIO]:
    """A rank's file. Raises CheckpointError if its size or its header is not what the index says."""
    file = index.folder / data_file(part.rank)
    expected = header_of(part.entries, index.token, part.rank)
    try:
        with open_plain(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != part.size:
                raise CheckpointError(f"{file} has {size} bytes instead of {part.size}: it is truncated or foreign")
            if opened.read(len(expected)) != expected:
                opened.seek(0)
                raise CheckpointError(f"{file} {_what_it_is(opened.read(1 << 16), index.token)}")
            yield opened
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _view(values: Tensor, shape: tuple[int, ...], place: BoxStrides) -> Tensor:
    return values.as_strided(shape, place.strides, values.storage_offset() + place.offset)


def _what_it_is(start: bytes, token: str) -> str:
    """Says what a file with an unexpected header is."""
    if start[:1] == b"\x80" or start[:2] == b"PK":
        return "is a pickle or an archive, not safetensors; such files are never loaded"
    try:
        length = int.from_bytes(start[:8], "little")
        table: Any = json.loads(start[8 : 8 + length])
        other = table["__metadata__"]["checkpoint"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "has a damaged header"
    return "belongs to another checkpoint" if other != token else "has another header than the index says"
