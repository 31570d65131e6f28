"""Whole tensors on disk as Hugging Face has them: safetensors files of limited size, and an index where there are many.

Where every byte goes is known before the first is written, so tensors may come one by one and in any order: no more
than one is ever in memory. All is written under hidden names, and takes its own when nothing is missing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from .format import SAFETENSORS, CheckpointError
from .write import bytes_of, sync_folder

SHARD_BYTES = 5_000_000_000
WEIGHTS = re.compile(r"(adapter_)?(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
"""Names under which a model's or an adapter's weights are looked for."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Output:
    """A folder of files that all appear when the block ends without an error, and none of which stays otherwise.

    ``replaces``: weights that were there before go when the new ones appear.
    """

    def __init__(self, folder: Path, *, replaces: bool = False) -> None:
        self.folder, self._replaces = folder, replaces
        self._made = not folder.exists()
        self._names: list[str] = []
        self._shown: list[Path] = []
        self._done = False

    def __enter__(self) -> Self:
        return self

    def new(self, name: str, start: bytes = b"") -> Path:
        """A file that will have this name; where its bytes go till then. The last one is the last to appear."""
        if not self._names:
            self._open()
        self._names.append(name)
        self._hidden(name).write_bytes(start)
        return self._hidden(name)

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in list(self.folder.iterdir()):  # what one that was killed has left
            if file.name[:1] == "." and file.suffix == ".tmp" and WEIGHTS.fullmatch(file.name[1:-4]):
                file.unlink(missing_ok=True)

    def _hidden(self, name: str) -> Path:
        return self.folder / f".{name}.tmp"

    @property
    def files(self) -> list[Path]:
        return [self.folder / name for name in self._names]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self.show()
            except OSError as failed:
                error = failed
        if error is not None:
            needed = self._remove()
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"{self.folder} was not written: {error}; {self._remedy(error, needed)}"
                ) from error

    def show(self) -> None:
        """Makes all durable, and gives it its names, unless that was done."""
        if self._done or not self._names:
            return
        for name in self._names:
            with open(self._hidden(name), "rb") as opened:
                os.fsync(opened.fileno())
        if self._replaces:  # before: a mixture of two models must not look like one, whatever happens now
            for file in [file for file in self.folder.iterdir() if WEIGHTS.fullmatch(file.name)]:
                file.unlink()
        for name in self._names:
            if not (self.folder / name).exists():
                self._shown.append(self.folder / name)
            os.replace(self._hidden(name), self.folder / name)
        sync_folder(self.folder)
        self._done = True

    def _remove(self) -> int:
        """Takes back what was written; returns how many bytes that was."""
        written = 0
        for file in [*map(self._hidden, self._names), *self._shown]:
            with contextlib.suppress(OSError):
                written += file.stat().st_size
                file.unlink()
        if self._made:
            with contextlib.suppress(OSError):  # somebody else has put something there
                self.folder.rmdir()
        return written

    def _remedy(self, error: OSError, written: int) -> str:
        if error.errno not in NO_ROOM:
            return "what was written of it is removed; see to that, or write to another folder"
        free = shutil.disk_usage(self.folder if self.folder.exists() else self.folder.parent).free
        return (
            f"the {written / 1e9:.3f} GB that were written are removed, and {free / 1e9:.3f} GB are free there now; "
            "make room, or write to another disk"
        )


class Whole(NamedTuple):
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Shards:
    """The files of some tensors, each at most so large, unless one tensor is larger; ``stem.safetensors`` if one does.

    >>> import tempfile
    >>> with Output(Path(tempfile.mkdtemp())) as output:
    ...     shards = Shards(output, [Whole("bias", (3,), torch.float32)])
    ...     shards.write("bias", torch.ones(3))
    ...     shards.finish()
    >>> [file.name for file in output.files]
    ['model.safetensors']
    """

    def __init__(
        self, output: Output, tensors: Sequence[Whole], shard_bytes: int = SHARD_BYTES, stem: str = "model"
    ) -> None:
        self._output, self._stem = output, stem
        self._total = sum(tensor.nbytes for tensor in tensors)
        groups = _groups(tensors, shard_bytes)
        self._places: dict[str, tuple[Whole, Path, int]] = {}
        self._weight_map: dict[str, str] = {}
        """By tensor, its file; empty if there is one only."""
        self._missing = {tensor.name for tensor in tensors}
        for number, group in enumerate(groups, start=1):
            many = f"-{number:05}-of-{len(groups):05}" if len(groups) > 1 else ""
            name = f"{stem}{many}.safetensors"
            header, offsets = _header(group)
            file = output.new(name, header)
            for tensor in group:
                self._places[tensor.name] = tensor, file, len(header) + offsets[tensor.name]
                if many:
                    self._weight_map[tensor.name] = name

    def write(self, name: str, values: Tensor) -> None:
        """Puts a tensor, on the CPU, to its place."""
        expected, file, offset = self._places[name]
        assert (values.dtype, tuple(values.shape)) == (expected.dtype, expected.shape), name
        made = values.detach().contiguous()
        with open(file, "r+b") as opened:
            opened.seek(offset)
            opened.write(bytes_of(made))
        self._missing.discard(name)

    def finish(self) -> None:
        """Writes the index, by which several files are found; all tensors are there."""
        assert not self._missing, sorted(self._missing)[0]
        if self._weight_map:
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(self._weight_map.items()))}
            self._output.new(f"{self._stem}.safetensors.index.json", as_json(index))


def _groups(tensors: Sequence[Whole], shard_bytes: int) -> list[list[Whole]]:
    groups: list[list[Whole]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return groups


def _header(tensors: Sequence[Whole]) -> tuple[bytes, dict[str, int]]:
    """The head of a file, and where each tensor lies behind it: the widest first, so that all are aligned."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, offset = {}, 0
    for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):
        offsets[tensor.name], end = offset, offset + tensor.nbytes
        table[tensor.name] = {
            "dtype": SAFETENSORS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


def as_json(value: object) -> bytes:
    """As people read it."""
    return (json.dumps(value, indent=2) + "\n").encode()
