"""What a checkpoint is on disk. Names, JSON and headers; every field that is read is checked here.

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

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .boxes import Box, Region, flaw, numel_of, whole_box

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
CHUNK = 8 << 20
"""Bytes that one checksum is for. A reader that needs a part of a range checks no more than it reads, nearly."""

VALUE = "value"
"""Kind of the parameter itself: the fp32 master where there is one, which the 16-bit parameter is rounded from."""
SHOWN = "shown"
"""Kind of the older parameters that the next step runs on, where a delayed update waits to be published."""
BUFFER = "buffer"

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


def data_file(rank: int) -> str:
    """The file of a rank's ranges."""
    return f"rank-{rank:05}.safetensors"


def part_file(rank: int) -> str:
    """The file of a rank's part of the index."""
    return f"rank-{rank:05}.json"


def failure_file(rank: int) -> str:
    """Where a rank says that it could not write its part."""
    return f"rank-{rank:05}.failed"


def tensor_kind(rank: int) -> str:
    """Kind of a tensor inside a rank's values: the scheduler's, the loader's, ``extra``."""
    return f"tensor of rank {rank}"


class Entry(NamedTuple):
    """A range on disk."""

    name: str
    """Of the parameter or buffer, as ``named_parameters()`` has it."""
    kind: str
    """``VALUE``, or what the optimizer calls this state, and so on."""
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
        shape = tuple(_count(size) for size in value["shape"])
        box: Box = whole_box(shape)
        if "box" in value:
            box = tuple((_count(low), _count(high)) for low, high in value["box"])
            if len(box) != len(shape) or any(
                not low <= high <= size for (low, high), size in zip(box, shape, strict=True)
            ):
                raise ValueError(f"box {box} is not inside shape {shape}")
        start, stop = (_count(number) for number in value["range"])
        if not start <= stop <= numel_of(box):
            raise ValueError(f"range {start}:{stop} is not inside a box of {numel_of(box)} elements")
        checksums = tuple(_count(number) for number in value["crc32"])
        name, kind = value["name"], value["kind"]
        if not isinstance(name, str) or not isinstance(kind, str):
            raise TypeError("name and kind must be strings")
        made = cls(
            name, kind, shape, Region(box, start, stop), DTYPES[value["dtype"]], _count(value["offset"]), checksums
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
        header, size = _count(value["header"]), _count(value["size"])
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
        return cls(_count(value["rank"]), size, header, entries, value["scalars"], value["values"])


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no count")
    return value


class Place(NamedTuple):
    """An entry, and whose file it is in."""

    rank: int
    entry: Entry


class Index:
    """A complete checkpoint's index, checked: every state of every parameter is there, each element once."""

    def __init__(self, folder: Path, token: str, parts: Sequence[Part]) -> None:
        self.folder, self.token, self.parts = folder, token, tuple(parts)
        self.places: dict[tuple[str, str], list[Place]] = {}
        for part in parts:
            for entry in part.entries:
                self.places.setdefault((entry.name, entry.kind), []).append(Place(part.rank, entry))
        self.kinds: dict[str, list[str]] = {}
        """What there is of each parameter."""
        for name, kind in self.places:
            self.kinds.setdefault(name, []).append(kind)
        self.scalars: dict[str, Any] = {}
        for part in parts:
            self.scalars.update(part.scalars)

    @property
    def values(self) -> Mapping[str, Any]:
        """What all ranks share."""
        return self.parts[0].values

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter or buffer."""
        return self.places[name, self.kinds[name][0]][0].entry.shape

    def check(self) -> None:
        """Raises ValueError where ranges overlap, are missing or contradict each other."""
        for (name, kind), places in self.places.items():
            first = places[0].entry
            for _, entry in places:
                if (entry.shape, entry.dtype) != (first.shape, first.dtype):
                    raise ValueError(f"{name!r} ({kind}) is stored with two shapes or dtypes")
            if first.shape != self.shape(name):
                raise ValueError(f"{name!r} ({kind}) has shape {first.shape}, another state of it {self.shape(name)}")
            wrong = flaw(first.shape, [entry.region for _, entry in places])
            if wrong is not None:
                raise ValueError(f"{name!r} ({kind}): {wrong}")


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


def index_json(token: str, parts: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> bytes:
    """The index of all parts."""
    whole = {"version": VERSION, "checkpoint": token, **about, "parts": list(parts)}
    return json.dumps(whole, separators=(",", ":")).encode()


def marker_json(index: bytes, steps: int, saved: int) -> bytes:
    """What the marker says: which index belongs to it, and how new it is."""
    digest = hashlib.sha256(index).hexdigest()
    return json.dumps({"index_bytes": len(index), "index_sha256": digest, "steps": steps, "saved_ns": saved}).encode()


class Marker(NamedTuple):
    """The marker of a complete checkpoint."""

    index_bytes: int
    index_sha256: str
    steps: int
    saved_ns: int


def read_marker(folder: Path) -> Marker | None:
    """The marker of a folder; None if it is no complete checkpoint."""
    try:
        with open(folder / MARKER, "rb") as file:
            value = json.loads(file.read(4096))
        digest = str(value["index_sha256"])
        return Marker(_count(value["index_bytes"]), digest, _count(value["steps"]), _count(value["saved_ns"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_index(folder: Path) -> Index:
    """Reads and checks the index of a complete checkpoint. No data is read."""
    marker = read_marker(folder)
    if marker is None:
        if (folder / MARKER).exists():
            raise CheckpointError(f"{folder / MARKER} is damaged, so {folder} is not known to be complete")
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no readable {MARKER}")
    file = folder / INDEX
    try:
        if marker.index_bytes > LARGEST_JSON:
            raise CheckpointError(f"{folder / MARKER} speaks of an index of {marker.index_bytes} bytes")
        with open(file, "rb") as opened:
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
    if value["version"] != VERSION:
        raise ValueError(f"version {value['version']!r}, this zeroshard reads {VERSION}")
    token = value["checkpoint"]
    if not isinstance(token, str) or not re.fullmatch("[0-9a-f]{1,64}", token):
        raise ValueError(f"{token!r} names no checkpoint")
    parts = [Part.from_json(part) for part in value["parts"]]
    if not parts or [part.rank for part in parts] != list(range(len(parts))):
        raise ValueError("its parts are not those of ranks 0, 1, 2 and so on")
    index = Index(folder, token, parts)
    index.check()
    return index
