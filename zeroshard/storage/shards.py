"""Whole tensors on disk as Hugging Face has them: safetensors files of limited size, and an index where there are many.

Where every byte goes is known before the first is written, so tensors may come one by one and in any order: no more
than one is ever in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .format import SAFETENSORS
from .output import Output
from .write import bytes_of

SHARD_BYTES = 5_000_000_000


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
