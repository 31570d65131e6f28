"""Writes one rank's ranges, streaming: no copy of a shard is made, and checksums are found on the way."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from .boxes import Region
from .format import CHUNK, Entry, Part, data_file, header_of, part_file

FLUSH_BYTES = 32 << 20
"""Bytes that are written before the disk is asked to begin."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""How a system says that a file cannot grow."""
NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF})
"""How file systems say that a folder cannot be flushed, as some of the network do (EBADF: not if open for reading)."""


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
    path = folder / data_file(rank)
    with _named(path), open(path, "wb", buffering=0) as file, _Flusher(file.fileno()) as flusher:
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
            flusher.wrote(piece.nbytes)
            del values_here  # or the next piece would be put together beside this one
        flusher.finish()
        os.fsync(file.fileno())
    part = Part(rank, len(header) + offset, len(header), tuple(entries), scalars, values)
    write_json(folder / part_file(rank), json.dumps(part.to_json(token), separators=(",", ":")).encode())


@contextlib.contextmanager
def _named(file: Path) -> Iterator[None]:
    """What goes wrong with an open file names it, which the system does not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error


def remedy_of(error: BaseException) -> str:
    """What to add to the words of an error."""
    no_room = isinstance(error, OSError) and error.errno in NO_ROOM
    return "; make room there, or save to another disk" if no_room else ""


class _Flusher:
    """Keeps the disk busy while the rest is still being read and summed, instead of all waiting for the end.

    A plain thread: an executor takes no more work once the interpreter begins to end, and a save goes on then.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._unflushed, self._over = descriptor, 0, False
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def finish(self) -> None:
        """Ends the thread, and raises what it met: the system tells of a failed write once, and no flush after it."""
        self._stop()
        if self._error is not None:
            raise self._error

    def _stop(self) -> None:
        if self._thread is not None:
            self._over = True
            self._wanted.set()
            self._thread.join()

    def wrote(self, size: int) -> None:
        """Has what was written flushed, once there is enough of it."""
        self._unflushed += size
        if self._unflushed < FLUSH_BYTES:
            return
        self._unflushed = 0
        if self._thread is None:
            thread = threading.Thread(target=self._flush, name="zeroshard flush", daemon=True)
            with contextlib.suppress(RuntimeError):  # no new thread as the interpreter ends: the end flushes all
                thread.start()
                self._thread = thread
        self._wanted.set()

    def _flush(self) -> None:
        while self._wanted.wait() and not self._over:
            self._wanted.clear()
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                self._error = error
                return


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
    with _named(temporary), open(temporary, "wb") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(temporary, file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Makes names in a folder as durable as the files: a rename is lost in a crash otherwise."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:  # above all EIO: then a name is lost that was thought safe
            raise OSError(
                error.errno, f"{error.strerror}, when its names were to be made durable", str(folder)
            ) from error
    finally:
        os.close(descriptor)
