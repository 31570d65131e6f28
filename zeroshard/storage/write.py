"""Writes one rank's ranges to its file, and small files whole or not at all.

Writing streams: no copy of a shard is made, and checksums are computed on the way.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..system.memory import bytes_of
from .contents import Contents
from .format import CHUNK, Part, data_file, header_of, part_file

FLUSH_BYTES = 32 << 20
"""Bytes that are written before the disk is asked to begin."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that say that a file cannot grow."""
NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF})
"""Errors of file systems, mostly of networks, that cannot flush a folder (EBADF: not one that is open for reading)."""


def write_part(folder: Path, token: str, rank: int, contents: Contents) -> None:
    """Writes a rank's data file to the disk. Then tells rank 0 what is in the file."""
    entries, offset = [], 0
    for item in contents.items:
        entries.append(item.entry.stored(offset))
        offset += item.entry.nbytes
    header = header_of(entries, token, rank)
    path = folder / data_file(rank)
    with _named(path), open(path, "wb", buffering=0) as file, contextlib.closing(_Flusher(file.fileno())) as flusher:
        _write_all(file.fileno(), memoryview(header))
        staging: Tensor | None = None
        for place, item in enumerate(contents.items):
            entry, values = item.entry, item.read().detach().reshape(-1)
            assert (values.dtype, values.numel()) == (entry.dtype, entry.region.numel), entry.key
            if values.is_cuda and staging is None:
                staging = torch.empty(CHUNK, dtype=torch.uint8, device="cpu", pin_memory=True)
            checksums = tuple(_write_chunk(file.fileno(), chunk) for chunk in _chunks(values, staging))
            entries[place] = entry.stored(entries[place].offset, checksums)
            flusher.wrote(entry.nbytes)
            del values  # before the next item is read, which may need as much memory again
        flusher.finish()
        os.fsync(file.fileno())
    part = Part(
        rank, contents.seat, len(header) + offset, len(header), tuple(entries), contents.scalars, contents.values
    )
    write_whole(folder / part_file(rank), json.dumps(part.to_json(), separators=(",", ":")).encode(), durable=False)


@contextlib.contextmanager
def _named(file: Path) -> Iterator[None]:
    """Puts the file's name into an error of an open file: the system does not name the file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error


def remedy_of(error: BaseException) -> str:
    """What a user can do about an error; to be added to its message."""
    no_room = isinstance(error, OSError) and error.errno in NO_ROOM
    return "; make room there, or save to another disk" if no_room else ""


class _Flusher:
    """Makes the disk write early bytes while later bytes are still being read and checksummed.

    Each flush has a thread of its own: a thread pool takes no work once the interpreter begins to end, but a save goes
    on then.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._unflushed = descriptor, 0
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def wrote(self, size: int) -> None:
        """Begins to flush if enough was written, unless a flush goes on."""
        self._unflushed += size
        if self._unflushed < FLUSH_BYTES or (self._thread is not None and self._thread.is_alive()):
            return
        self._unflushed = 0
        thread = threading.Thread(target=self._flush, name="zeroshard flush", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter ends, so no thread starts: the last flush does it
            thread.start()
            self._thread = thread

    def _flush(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._error = self._error or error

    def close(self) -> None:
        """Waits for a flush that goes on."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Raises if a flush failed: the system reports a failed write only once, so the last flush would succeed."""
        self.close()
        if self._error is not None:
            raise self._error


def _chunks(values: Tensor, staging: Tensor | None) -> Iterator[memoryview]:
    raw = values.contiguous().view(torch.uint8) if values.numel() else values.new_empty(0, dtype=torch.uint8)
    for start in range(0, raw.numel(), CHUNK):
        chunk = raw[start : start + CHUNK]
        if chunk.is_cuda:
            assert staging is not None
            chunk = staging[: chunk.numel()].copy_(chunk)
        yield bytes_of(chunk)


def _write_chunk(descriptor: int, chunk: memoryview) -> int:
    checksum = zlib.crc32(chunk)
    _write_all(descriptor, chunk)
    return checksum


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def write_whole(file: Path, text: bytes, *, durable: bool = True) -> None:
    """Writes a small file so that others see all of it or nothing.

    With ``durable``, the file and all names in its folder outlive a crash.
    """
    temporary = file.with_name(f".{file.name}.tmp")
    with _named(temporary), open(temporary, "wb") as opened:
        opened.write(text)
        opened.flush()
        if durable:
            os.fsync(opened.fileno())
    os.replace(temporary, file)
    if durable:
        sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable: otherwise a crash may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:  # above all EIO: the name of a file may be lost
            raise OSError(
                error.errno, f"{error.strerror}, when its names were to be made durable", str(folder)
            ) from error
    finally:
        os.close(descriptor)
