"""Writes whole tensors in Hugging Face's format: safetensors files of limited size, and an index for several files.

``Output`` makes files appear together: they are written into a hidden folder, and move out of it when nothing is
missing. ``Shards`` knows where every byte goes before the first is written. So tensors may come one by one and in any
order, and no more than one is ever in memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..system.memory import bytes_of
from ..system.sizes import size_text
from .claim import FolderClaim, is_left
from .format import CheckpointError, safetensors_header
from .write import NO_ROOM, sync_folder

WEIGHTS = re.compile(r"(adapter_)?(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
"""Names under which the weights of a model or an adapter are looked for."""
SHARD_BYTES = 5_000_000_000
_HIDDEN = re.compile(r"\.zeroshard\.[0-9a-f]{16}\.tmp")


class Output:
    """Files that all appear in a folder when the block ends without an error. Otherwise none of them stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made = not folder.exists()
        self._claim: FolderClaim | None = None
        self._names: list[str] = []
        self._replaced: list[Path] = []
        self._shown: list[Path] = []
        self._done = False
        self._irrevocable = False
        """The old files are removed. From then on the new files stay, whatever happens."""

    def __enter__(self) -> Self:
        return self

    def replace(self, files: Sequence[Path]) -> None:
        """Removes these files when the new ones appear."""
        self._replaced = list(files)

    def new(self, name: str, start: bytes = b"") -> Path:
        """Begins a file that will have this name. Returns where to write it. The last file is the last to appear."""
        if self._claim is None:
            if not self._made:
                _remove_leftovers(self.folder)
            self._claim = FolderClaim(self.folder / f".zeroshard.{secrets.token_hex(8)}.tmp")
        self._names.append(name)
        self._hidden(name).write_bytes(start)
        return self._hidden(name)

    def _hidden(self, name: str) -> Path:
        assert self._claim is not None
        return self._claim.folder / name

    @property
    def files(self) -> list[Path]:
        return [self.folder / name for name in self._names]

    def show(self) -> None:
        """Makes all files durable and gives them their names, unless that was done."""
        if self._done or not self._names:
            return
        for name in self._names:
            with open(self._hidden(name), "rb") as opened:
                os.fsync(opened.fileno())
        for file in self._replaced:  # before new files appear: files of two models must never be there together
            file.unlink(missing_ok=True)
            self._irrevocable = True
        for name in self._names:
            if not (self.folder / name).exists():
                self._shown.append(self.folder / name)
            os.replace(self._hidden(name), self.folder / name)
        sync_folder(self.folder)
        self._done = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = error
        if failure is None:
            try:
                self.show()
            except BaseException as problem:
                failure = problem
        written, unnamed = 0, [name for name in self._names if self._hidden(name).exists()]
        if failure is not None and not self._irrevocable:
            for file in [*map(self._hidden, unnamed), *self._shown]:
                with contextlib.suppress(OSError):
                    written += file.stat().st_size
                    file.unlink()
        if self._claim is not None:
            self._claim.release()
            if not (self._irrevocable and unnamed):
                shutil.rmtree(self._claim.folder, ignore_errors=True)
        if failure is not None and self._made:
            with contextlib.suppress(OSError):  # the folder is not there, or somebody has put something into it
                self.folder.rmdir()
        if isinstance(failure, OSError):
            remedy = self._remedy(failure, written, unnamed)
            raise CheckpointError(f"{self.folder} was not written: {failure}; {remedy}") from failure
        if failure is not None and error is None:
            raise failure

    def _remedy(self, error: OSError, written: int, unnamed: Sequence[str]) -> str:
        if self._irrevocable and not unnamed:
            return "all files are there, but may not outlive a power failure; see to that, and write them again"
        if self._irrevocable:
            return (
                "what was there before is gone, and what was written is left: see to that and, before anything else is "
                f"written there, rename {self._hidden(unnamed[0]).relative_to(self.folder)} to {unnamed[0]}"
                + (f", and {len(unnamed) - 1} more likewise" if len(unnamed) > 1 else "")
            )
        if error.errno not in NO_ROOM:
            return "what was written of it is removed; see to that, or write to another folder"
        free = shutil.disk_usage(self.folder if self.folder.exists() else self.folder.parent).free
        return (
            f"the {size_text(written)} that were written are removed, and {size_text(free)} are free there now; "
            "make room, or write to another disk"
        )


def _remove_leftovers(folder: Path) -> None:
    """Removes the files of writers that were killed."""
    for name in os.listdir(folder):
        if _HIDDEN.fullmatch(name) and is_left(folder / name):
            shutil.rmtree(folder / name, ignore_errors=True)


class WholeTensor(NamedTuple):
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Shards:
    """The safetensors files of some tensors. None is larger than ``shard_bytes``, unless one tensor is larger.

    >>> import tempfile
    >>> with Output(Path(tempfile.mkdtemp())) as output:
    ...     shards = Shards(output, [WholeTensor("bias", (3,), torch.float32)])
    ...     shards.write("bias", torch.ones(3))
    ...     shards.finish()
    >>> [file.name for file in output.files]
    ['model.safetensors']
    """

    def __init__(
        self, output: Output, tensors: Sequence[WholeTensor], shard_bytes: int = SHARD_BYTES, stem: str = "model"
    ) -> None:
        self._output, self._stem = output, stem
        self._total = sum(tensor.nbytes for tensor in tensors)
        self._places: dict[str, tuple[WholeTensor, Path, int]] = {}
        """By tensor, its file, and its first byte there."""
        self._weight_map: dict[str, str] = {}
        """By tensor, the name of its file; empty if there is one file only."""
        self._missing = {tensor.name for tensor in tensors}
        groups = _groups(tensors, shard_bytes)
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
        """Writes a tensor, which is on the CPU, to its place."""
        expected, file, offset = self._places[name]
        assert (values.dtype, tuple(values.shape)) == (expected.dtype, expected.shape), name
        contiguous = values.detach().contiguous()
        with open(file, "r+b") as opened:
            opened.seek(offset)
            opened.write(bytes_of(contiguous))
        self._missing.discard(name)

    def finish(self) -> None:
        """All tensors are written: writes the index that says which file has which tensor."""
        assert not self._missing, sorted(self._missing)[0]
        if self._weight_map:
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(self._weight_map.items()))}
            self._output.new(f"{self._stem}.safetensors.index.json", as_json(index))


def _groups(tensors: Sequence[WholeTensor], shard_bytes: int) -> list[list[WholeTensor]]:
    groups: list[list[WholeTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return groups


def _header(tensors: Sequence[WholeTensor]) -> tuple[bytes, dict[str, int]]:
    """The header of a file, and where each tensor lies behind it: the widest first, so that all are aligned."""
    table, offset = [], 0
    for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):
        table.append((tensor.name, tensor.dtype, tensor.shape, offset))
        offset += tensor.nbytes
    return safetensors_header(table, {"format": "pt"}), {name: start for name, _, _, start in table}


def as_json(value: object) -> bytes:
    """JSON that people can read."""
    return (json.dumps(value, indent=2) + "\n").encode()
