"""What a checkpoint is on disk. Names, JSON and headers of its parts; every field that is read is checked here.

    folder/
      rank-00000.safetensors   the ranges that rank 0 wrote, readable by any safetensors tool
      rank-00000.json          rank 0's part of the index: what each range is, where it lies, its checksums
      ...                      one pair for every rank
      index.json               all parts together
      COMPLETE                 the marker, written last: size and checksum of the index

A rank's part follows from the layout and needs nobody else's word. The small format has a reason: of torch's own
``torch.distributed.checkpoint``, the plain metadata is a pickle, and its safetensors storage turns what is no tensor
into a pickle inside a ``.safetensors`` file, keeps no checksums, and has no marker that tells a complete checkpoint
from one that a crash cut short. So ranges are written as safetensors here, and all else is JSON.

A stored range is found by the parameter's name, the *kind* of state, and the elements it has of the whole parameter,
never by its place in a flat: padding, units, stage and world size leave no trace.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .boxes import Box, Region, numel_of, whole_box

VERSION = 1
INDEX = "index.json"
MARKER = "COMPLETE"
TOKEN = "token"
"""By which ranks find out, at the start of a save, whether they see one folder."""
CLAIM = "claim"
"""Locked by the process that writes, see claim.py."""
_WRITTEN_WHOLE = r"(index\.json|COMPLETE|rank-\d{5,}\.(json|failed))"
OWN_NAME = re.compile(rf"token|claim|rank-\d{{5,}}\.safetensors|{_WRITTEN_WHOLE}|\.{_WRITTEN_WHOLE}\.tmp")
"""Every name that a save gives to a file in a checkpoint's folder."""
LARGEST_JSON = 1 << 30
LARGEST_HEADER = 100_000_000
"""What safetensors itself allows."""
MOST_DIMENSIONS = 64
"""What torch itself allows."""
CHUNK = 8 << 20
"""Bytes that one checksum is for. A reader that needs a part of a range checks no more than it reads, nearly."""

VALUE = "value"
"""Kind of the parameter itself: the fp32 master where there is one, which the 16-bit parameter is rounded from."""
SHOWN = "shown"
"""Kind of the older parameters that the next step runs on, where a delayed update waits to be published."""
BUFFER = "buffer"
_STATE = "state "
"""Begins the kind of every optimizer state, so that none can be taken for another kind, whatever its name."""

SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in SAFETENSORS.items()}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message names the file, what is wrong with it and what to do."""


class InvalidIndexError(CheckpointError):
    """An index holds what it cannot hold: it was edited, or is of another program."""


def data_file(rank: int) -> str:
    """The file of a rank's ranges."""
    return f"rank-{rank:05}.safetensors"


def part_file(rank: int) -> str:
    """The file of a rank's part of the index."""
    return f"rank-{rank:05}.json"


def failure_file(rank: int) -> str:
    """Where a rank says that it could not write its part."""
    return f"rank-{rank:05}.failed"


def state_kind(name: str) -> str:
    """Kind of what the optimizer calls this state.

    >>> state_kind("exp_avg")
    'state exp_avg'
    """
    return _STATE + name


def state_name(kind: str) -> str | None:
    """What the optimizer calls a state; None if the kind is another."""
    return kind.removeprefix(_STATE) if kind.startswith(_STATE) else None


def is_of_parameter(kind: str) -> bool:
    """Whether a range of this kind belongs to a parameter."""
    return kind in (VALUE, SHOWN) or kind.startswith(_STATE)


def tensor_kind(rank: int) -> str:
    """Kind of a tensor inside a rank's values: the scheduler's, the loader's, ``extra``."""
    return f"tensor of rank {rank}"


class Entry(NamedTuple):
    """A range on disk."""

    name: str
    """Of the parameter or buffer, as ``named_parameters()`` has it."""
    kind: str
    """``VALUE``, ``state_kind`` of what the optimizer calls this state, and so on."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    region: Region
    """Which of its elements."""
    dtype: torch.dtype
    offset: int
    """First byte, counted from the end of the file's header."""
    checksums: tuple[int, ...] = ()
    """CRC-32 of every ``CHUNK`` bytes."""

    @property
    def nbytes(self) -> int:
        return self.region.numel * self.dtype.itemsize

    @property
    def key(self) -> str:
        """Its name in the safetensors file."""
        box = "" if self.region.box == whole_box(self.shape) else f"{list(map(list, self.region.box))}"
        return f"{self.name}|{self.kind}|{box}{self.region.start}:{self.region.stop}"

    def with_checksums(self, checksums: tuple[int, ...]) -> Entry:
        """The same, once it is written."""
        return Entry(self.name, self.kind, self.shape, self.region, self.dtype, self.offset, checksums)

    def to_json(self) -> dict[str, Any]:
        """As the index has it."""
        found = {
            "name": self.name,
            "kind": self.kind,
            "shape": list(self.shape),
            "range": [self.region.start, self.region.stop],
            "dtype": SAFETENSORS[self.dtype],
            "offset": self.offset,
            "crc32": list(self.checksums),
        }
        if self.region.box != whole_box(self.shape):
            found["box"] = [list(side) for side in self.region.box]
        return found

    @classmethod
    def from_json(cls, value: Any) -> Entry:
        """Checked; raises KeyError, TypeError or ValueError."""
        if len(value["shape"]) > MOST_DIMENSIONS:
            raise ValueError(f"a shape of {len(value['shape'])} dimensions")
        shape = tuple(count(size) for size in value["shape"])
        count(math.prod(shape))
        box: Box = whole_box(shape)
        if "box" in value:
            box = tuple((count(low), count(high)) for low, high in value["box"])
            if len(box) != len(shape) or any(
                not low <= high <= size for (low, high), size in zip(box, shape, strict=True)
            ):
                raise ValueError(f"box {box} is not inside shape {shape}")
        start, stop = (count(number) for number in value["range"])
        if not start <= stop <= numel_of(box):
            raise ValueError(f"range {start}:{stop} is not inside a box of {numel_of(box)} elements")
        checksums = tuple(count(number) for number in value["crc32"])
        name, kind = value["name"], value["kind"]
        if not isinstance(name, str) or not isinstance(kind, str):
            raise TypeError("name and kind must be strings")
        made = cls(
            name, kind, shape, Region(box, start, stop), DTYPES[value["dtype"]], count(value["offset"]), checksums
        )
        if len(checksums) != -(-made.nbytes // CHUNK):
            raise ValueError(f"{name!r} has {len(checksums)} checksums for {made.nbytes} bytes")
        return made


@dataclass(frozen=True)
class Part:
    """What one rank wrote."""

    rank: int
    size: int
    """Bytes of its data file, header included."""
    header: int
    """Bytes of the header, its length included."""
    entries: tuple[Entry, ...]
    scalars: Mapping[str, Any]
    """By parameter, optimizer state that belongs to it as a whole, such as the step."""
    values: Mapping[str, Any]
    """What else this rank wants to find again: random state, loader; of rank 0 also what all ranks share."""

    def to_json(self, token: str) -> dict[str, Any]:
        """As it stands in a part's file and in the index."""
        return {
            "version": VERSION,
            "checkpoint": token,
            "rank": self.rank,
            "size": self.size,
            "header": self.header,
            "entries": [entry.to_json() for entry in self.entries],
            "scalars": dict(self.scalars),
            "values": dict(self.values),
        }

    @classmethod
    def from_json(cls, value: Any) -> Part:
        """Checked; raises KeyError, TypeError or ValueError."""
        if value["version"] != VERSION:
            raise ValueError(f"it has version {value['version']!r}, this zeroshard reads {VERSION}")
        entries = tuple(Entry.from_json(entry) for entry in value["entries"])
        header, size = count(value["header"]), count(value["size"])
        if header > LARGEST_HEADER:
            raise ValueError(f"a header of {header} bytes")
        end = 0
        for entry in entries:
            if entry.offset != end:
                raise ValueError(f"{entry.key!r} lies at byte {entry.offset}, where {end} is expected")
            end += entry.nbytes
        if header + end != size:
            raise ValueError(f"its ranges take {end} bytes after a header of {header}, but the file {size}")
        for name in ("scalars", "values"):
            if not isinstance(value[name], dict):
                raise TypeError(f"{name} must be a table")
        return cls(count(value["rank"]), size, header, entries, value["scalars"], value["values"])


def count(value: object) -> int:
    """Checked; raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no count")
    return value


def header_of(entries: Sequence[Entry], token: str, rank: int) -> bytes:
    """The head of a safetensors file: its length, then JSON, padded so that data starts on a boundary."""
    table: dict[str, Any] = {"__metadata__": {"checkpoint": token, "rank": str(rank)}}
    for entry in entries:
        table[entry.key] = {
            "dtype": SAFETENSORS[entry.dtype],
            "shape": [entry.region.numel],
            "data_offsets": [entry.offset, entry.offset + entry.nbytes],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text
