"""Reads a checkpoint: its index, then elements into memory that is there already. Checks every byte that is used."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ..system.memory import bytes_of, read_into
from ..system.sizes import size_text
from ..system.words import quoted, told
from .format import (
    CHUNK,
    INDEX,
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
    title,
)
from .limits import excess_of, largest_index_in
from .regions import BoxStrides, Overlap, Region, divide, flaw, overlaps

OPEN_FILES = 32
"""Most files that are open at a time: each takes a descriptor, and a run may have more ranks than descriptors."""
CHUNKS_IN_MEMORY = 4
"""Chunks that stay in memory, for a chunk that several pieces need."""
FREE_HOLES = 64 << 20
"""Bytes of values that may lie in holes of a file. Some file systems turn zeros into holes. A forged file may be one
large hole, which takes no disk and much memory."""


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
                    raise ValueError(f"{title(name, kind)} is stored with two shapes or dtypes")
            if is_of_parameter(kind):
                if (name, VALUE) not in self.places:
                    raise ValueError(f"{title(name, kind)} belongs to a parameter that is not there")
                if first.shape != self.shape(name):
                    raise ValueError(
                        f"{title(name, kind)} has shape {quoted(first.shape)}, the parameter {quoted(self.shape(name))}"
                    )
            wrong = flaw(first.shape, [entry.region for _, entry in places])
            if wrong is not None:
                raise ValueError(f"{title(name, kind)}: {wrong}")


def index_json(token: str, parts: Sequence[Mapping[str, Any]]) -> bytes:
    """The file of an index, from the JSON of its parts."""
    return json.dumps({"version": VERSION, "checkpoint": token, "parts": parts}, separators=(",", ":")).encode()


def read_index(folder: Path, tensors: int | None = None) -> Index:
    """Reads and checks the index of a complete checkpoint. Reads no data.

    Args:
        folder: the checkpoint.
        tensors: the number of parameters and buffers of the model that loads. An index that is far larger than such a
            model needs is not parsed. Without a model, the index may not be far larger than the data.

    Raises:
        CheckpointError: there is no marker, or the index is damaged or makes no sense.
    """
    marker = read_marker(folder)
    if marker is None:
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MARKER}")
    file = folder / INDEX
    try:
        largest = largest_index_in(folder, tensors)
        if marker.index_bytes > largest:
            raise CheckpointError(
                f"{folder / MARKER} speaks of an index of {size_text(marker.index_bytes)}, and what is here can need "
                f"{size_text(largest)} at most: it is forged, or of a far larger model"
            )
        with open_plain(file) as opened:
            text = opened.read(marker.index_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if len(text) != marker.index_bytes or hashlib.sha256(text).hexdigest() != marker.index_sha256:
        raise CheckpointError(f"{file} is not the one that {MARKER} was written for: it is damaged or foreign")
    if (excess := excess_of(text, largest)) is not None:
        raise CheckpointError(f"{file} has {excess}")
    try:
        value = json.loads(text)
        del text
        return _index_from(folder, value)
    except KeyError as error:
        raise CheckpointError(f"{file} is no index: KeyError: {quoted(error.args[0])}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is no index: {told(error)}") from error


def _index_from(folder: Path, value: Any) -> Index:
    check_version(value)
    token = value["checkpoint"]
    if not isinstance(token, str) or not re.fullmatch("[0-9a-f]{1,64}", token):
        raise ValueError(f"{quoted(token)} names no checkpoint")
    parts = [Part.from_json(part) for part in value["parts"]]
    if not parts or [part.rank for part in parts] != list(range(len(parts))):
        raise ValueError("its parts are not those of ranks 0, 1, 2 and so on")
    index = Index(folder, token, parts)
    index.check()
    return index


class CheckpointReader:
    """The data of a checkpoint. A file is opened when it is first needed."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._file = lru_cache(OPEN_FILES)(partial(_DataFile, index))
        self._good: set[tuple[object, ...]] = set()
        self._chunk = lru_cache(CHUNKS_IN_MEMORY)(partial(_read_chunk, index, self._file, self._good))
        self._verified: set[tuple[int, int, int]] = set()
        self._given: set[tuple[int, str]] = set()

    def read(self, name: str, kind: str, region: Region, target: Tensor) -> None:
        """Fills a 1-D tensor, of any dtype and on any device, with the elements of a region."""
        for rank, entry in self.index.places[name, kind]:
            for overlap in overlaps(region, entry.region):
                self._copy(rank, entry, overlap, target)

    def verify(self, name: str, kind: str, region: Region, flaw_of: Callable[[Tensor], str | None]) -> None:
        """Reads all chunks with elements of a region, each chunk once. Writes nothing.

        Args:
            name: of a parameter or buffer.
            kind: of the state.
            region: the elements that will be read.
            flaw_of: is given the elements of a chunk, and says what is wrong with them; None if nothing is.

        Raises:
            CheckpointError: a checksum is wrong, or the elements have a flaw.
        """
        for rank, entry in self.index.places[name, kind]:
            for overlap in overlaps(region, entry.region):
                for number in _numbers(entry, overlap.theirs.offset, overlap.theirs.end(overlap.shape)):
                    if (rank, entry.offset, number) in self._verified:
                        continue
                    if (wrong := flaw_of(self._chunk(rank, entry, number).view(entry.dtype))) is not None:
                        raise CheckpointError(f"{self.index.folder / data_file(rank)}: {title(name, kind)} has {wrong}")
                    self._verified.add((rank, entry.offset, number))

    def tensor_of(self, rank: int, name: str) -> Tensor:
        """A tensor inside a rank's values, in the dtype in which it is stored. Each can be asked for once."""
        kind = tensor_kind(rank)
        places = [entry for owner, entry in self.index.places.get((name, kind), ()) if owner == rank]
        if len(places) != 1 or places[0].region.numel != math.prod(places[0].shape):
            raise CheckpointError(f"{self.index.folder}: rank {rank} has no tensor {quoted(name)}")
        if (rank, name) in self._given:  # a small index could name a large tensor any number of times
            raise CheckpointError(f"{self.index.file}: tensor {quoted(name)} of rank {rank} is used twice")
        self._given.add((rank, name))
        self._check_holes(rank)
        entry = places[0]
        flat = torch.empty(entry.region.numel, dtype=entry.dtype, device="cpu")
        self.read(name, kind, entry.region, flat)
        return flat.reshape(entry.shape)

    def check_files(self) -> None:
        """Checks the size and the header of every file. Reads no data."""
        for part in self.index.parts:
            with _opened(self.index, part):
                pass

    def _check_holes(self, rank: int) -> None:
        """Values need memory that no model bounds. So a file must have about as many bytes that are no holes."""
        part = self.index.parts[rank]
        needed = sum(entry.nbytes for entry in part.entries if entry.kind == tensor_kind(rank))
        if needed > FREE_HOLES and (data := self._file(rank).bytes_outside_holes(needed)) < needed - FREE_HOLES:
            raise CheckpointError(
                f"{self.index.folder / data_file(rank)} has values of {size_text(needed)}, and all but "
                f"{size_text(data)} of the file are holes: it is forged, or parts of it were lost"
            )

    def _copy(self, rank: int, entry: Entry, overlap: Overlap, target: Tensor) -> None:
        step = CHUNK // entry.dtype.itemsize
        if overlap.theirs.strides != (1,):
            for part in divide(overlap, step):
                start, stop = part.theirs.offset, part.theirs.end(part.shape)
                source = self._elements(rank, entry, start, stop)
                _view(target, part.shape, part.mine).copy_(
                    _view(source, part.shape, BoxStrides(0, part.theirs.strides))
                )
            return
        start, stop = overlap.theirs.offset, overlap.theirs.end(overlap.shape)
        into = overlap.mine.offset - start
        while start < stop:  # chunk by chunk: what was just checked is still in the processor's cache
            end = min((start // step + 1) * step, stop)
            target[into + start : into + end].copy_(self._elements(rank, entry, start, end))
            start = end

    def _elements(self, rank: int, entry: Entry, start: int, stop: int) -> Tensor:
        """Elements of a range, in memory. They lie in one chunk, or in two."""
        step = CHUNK // entry.dtype.itemsize
        parts = [
            self._chunk(rank, entry, number).view(entry.dtype)[max(0, start - number * step) : stop - number * step]
            for number in _numbers(entry, start, stop)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _numbers(entry: Entry, start: int, stop: int) -> range:
    """The numbers of the chunks that have these elements of a range."""
    step = CHUNK // entry.dtype.itemsize
    return range(start // step, -(-stop // step))


class _DataFile:
    """A rank's data file. Its bytes are read into memory: a mapped file that becomes shorter would end the process."""

    def __init__(self, index: Index, rank: int) -> None:
        part = index.parts[rank]
        self._path, self._header = index.folder / data_file(rank), part.header
        with _opened(index, part) as opened:
            self._descriptor = os.dup(opened.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def bytes_outside_holes(self, enough: int) -> int:
        """Bytes of the file that were written. Counts no further than ``enough``."""
        found = end = 0
        while found < enough:
            try:
                start = os.lseek(self._descriptor, end, os.SEEK_DATA)
                end = os.lseek(self._descriptor, start, os.SEEK_HOLE)
            except OSError as error:  # ENXIO: the rest is a hole; else a file system that does not tell
                return found if error.errno == errno.ENXIO else enough
            found += end - start
        return found

    @property
    def last_write(self) -> tuple[int, int]:
        """Changes if somebody writes to the file."""
        status = os.fstat(self._descriptor)
        return status.st_mtime_ns, status.st_size

    def read(self, begin: int, end: int) -> Tensor:
        """Bytes of the file, counted from the end of the header."""
        data = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
        try:
            lacking = read_into(data, self._descriptor, self._header + begin)
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be read: {error}") from error
        if lacking:
            last = self._header + end - lacking
            raise CheckpointError(f"{self._path} became shorter while it was read: it ends before byte {last + 1}")
        return data


def _read_chunk(index: Index, file: Any, good: set[tuple[object, ...]], rank: int, entry: Entry, number: int) -> Tensor:
    """Reads one chunk of a range and compares its checksum, unless it is known as good and nobody wrote since."""
    begin = entry.offset + number * CHUNK
    data: Tensor = file(rank).read(begin, min(begin + CHUNK, entry.offset + entry.nbytes))
    key = rank, entry.offset, number, file(rank).last_write
    if key not in good:
        if zlib.crc32(bytes_of(data)) != entry.checksums[number]:
            raise CheckpointError(
                f"{index.folder / data_file(rank)} is damaged: {title(entry.name, entry.kind)} has another "
                f"checksum than when it was written, near byte {index.parts[rank].header + begin}"
            )
        good.add(key)
    return data


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
