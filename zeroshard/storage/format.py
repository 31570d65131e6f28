"""What a checkpoint is on disk: the names of its files, their JSON and headers, and the marker.

    folder/
      rank-00000.safetensors   the ranges that rank 0 wrote, readable by any safetensors tool
      ...                      one file for every rank
      index.json               of every rank: what each range is, where it lies, its checksums; and all other values
      COMPLETE                 the marker, written last: size and checksum of the index, and a checksum of its own

While a save goes on, each rank tells rank 0 in ``rank-00000.json`` what it wrote, or why it failed. Rank 0 puts these
parts together to the index and removes them.

Why not torch's own ``torch.distributed.checkpoint``? Its plain metadata is a pickle. Its safetensors storage turns
every value that is not a tensor into a pickle inside a ``.safetensors`` file. It has no checksums, and no marker that
tells a complete checkpoint from a save that a crash ended.

A stored range is found by the parameter's name, the *kind* of state, and its elements of the whole parameter. Its place
in a flat is not stored, so padding, units, stage and world size leave no trace.

Every field that is read from JSON is checked here.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from ..init.safetensors_file import DTYPES, MOST_DIMENSIONS
from ..system.words import line, quoted, told
from .regions import Region, numel_of, whole

VERSION = 2
INDEX = "index.json"
MARKER = "COMPLETE"
CLAIM = "claim"
"""A file that the process which writes the checkpoint has locked; see ``claim.FolderClaim``."""
_WRITTEN_WHOLE = r"(index\.json|COMPLETE|rank-\d{5,}\.json)"
DATA_NAME = re.compile(r"rank-\d{5,}\.safetensors")
OWN_NAME = re.compile(rf"claim|rank-\d{{5,}}\.safetensors|{_WRITTEN_WHOLE}|\.{_WRITTEN_WHOLE}\.tmp")
"""Every name that a save gives to a file in a checkpoint's folder."""
LARGEST_JSON = 1 << 30
LARGEST_MARKER = 4096
LARGEST_HEADER = 100_000_000
"""Bytes of a header that safetensors itself allows."""
MOST_ELEMENTS = 2**62
"""More elements than any tensor has."""
LONGEST_MESSAGE = 2000
"""Characters of a message. A file that somebody forged may have names of any length."""
CHUNK = 8 << 20
"""Bytes of a range that share one checksum. So a reader of a part of a range checks little more than that part."""
LATEST_NS = 2**62
"""The year 2116: the latest time that a marker may have. A new save must always get a later time than all others."""

VALUE = "value"
"""Kind of the parameter itself: the fp32 master where there is one, which the 16-bit parameter is rounded from."""
SHOWN = "shown"
"""Kind of the older parameters that the next step runs on, where a delayed update waits to be published."""
BUFFER = "buffer"
"""Kind of a buffer of the model."""
_STATE = "state "
"""Begins the kind of every optimizer state, so that no name of a state can be taken for another kind."""

SAFETENSORS = {dtype: name for name, dtype in DTYPES.items()}
"""The dtypes that a checkpoint can contain, by the names that safetensors has for them."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message names the file, what is wrong with it and what to do.

    The message is one line of printable characters, whatever names and values a file has.
    """

    def __init__(self, message: str) -> None:
        super().__init__(line(message, LONGEST_MESSAGE))


class InvalidIndexError(CheckpointError):
    """A value in an index makes no sense: the index was edited, or is of another program."""


def data_file(rank: int) -> str:
    """The file of a rank's ranges."""
    return f"rank-{rank:05}.safetensors"


def part_file(rank: int) -> str:
    """The file in which a rank tells rank 0 what it wrote, or why it failed."""
    return f"rank-{rank:05}.json"


def state_kind(name: str) -> str:
    """Kind of an optimizer's state of this name.

    >>> state_kind("exp_avg")
    'state exp_avg'
    """
    return _STATE + name


def state_name(kind: str) -> str | None:
    """The optimizer's name of a state; None if the kind is no optimizer state."""
    return kind.removeprefix(_STATE) if kind.startswith(_STATE) else None


def is_of_parameter(kind: str) -> bool:
    """True if a range of this kind belongs to a parameter."""
    return kind in (VALUE, SHOWN) or kind.startswith(_STATE)


def title(name: str, kind: str) -> str:
    """A range's name and kind, for messages.

    >>> title("first.weight", "state exp_avg")
    "'first.weight' (state exp_avg)"
    """
    return f"{quoted(name)} ({line(kind, 60)})"


def tensor_kind(rank: int) -> str:
    """Kind of a tensor inside a rank's values: the scheduler's, the loader's, ``extra``."""
    return f"tensor of rank {rank}"


class Entry(NamedTuple):
    """A range on disk, as the index has it."""

    name: str
    """Name of the parameter or buffer, as in ``named_parameters()``."""
    kind: str
    """``VALUE``, ``BUFFER``, ``state_kind(...)`` and so on."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    region: Region
    """Which elements of the parameter the range has."""
    dtype: torch.dtype
    """How the elements are stored."""
    offset: int = 0
    """First byte, counted from the end of the file's header."""
    checksums: tuple[int, ...] = ()
    """CRC-32 of every ``CHUNK`` bytes."""

    @property
    def nbytes(self) -> int:
        return self.region.numel * self.dtype.itemsize

    @property
    def is_of_whole(self) -> bool:
        """True if the range counts the elements of the whole parameter, which no tensor parallelism divides."""
        return self.region.sides == whole(self.shape)

    @property
    def key(self) -> str:
        """The range's name in the safetensors file."""
        box = "" if self.is_of_whole else f"{list(map(list, self.region.sides))}"
        return f"{self.name}|{self.kind}|{box}{self.region.start}:{self.region.stop}"

    def stored(self, offset: int, checksums: tuple[int, ...] = ()) -> Entry:
        """The entry with its place in the file, and its checksums once they are known."""
        return self._replace(offset=offset, checksums=checksums)

    def to_json(self) -> dict[str, Any]:
        """The entry in an index."""
        return {
            "name": self.name,
            "kind": self.kind,
            "shape": self.shape,
            "range": [self.region.start, self.region.stop],
            "dtype": SAFETENSORS[self.dtype],
            "offset": self.offset,
            "crc32": self.checksums,
            **({} if self.is_of_whole else {"box": self.region.sides}),
        }

    @classmethod
    def from_json(cls, value: Any) -> Entry:
        """Reads and checks an entry. Raises KeyError, TypeError or ValueError."""
        shape = shape_from(value["shape"])
        sides = whole(shape)
        if "box" in value:
            if len(value["box"]) != len(shape):
                raise ValueError(f"a box of {len(value['box'])} sides is not inside shape {quoted(shape)}")
            sides = tuple((count(low), count(high)) for low, high in value["box"])
        if not all(low <= high <= size for (low, high), size in zip(sides, shape, strict=True)):
            raise ValueError(f"box {quoted(sides)} is not inside shape {quoted(shape)}")
        start, stop = (count(number) for number in value["range"])
        if not start <= stop <= numel_of(sides):
            raise ValueError(f"range {start}:{stop} is not inside a box of {numel_of(sides)} elements")
        checksums = tuple(count(number) for number in value["crc32"])
        name, kind = value["name"], value["kind"]
        if not isinstance(name, str) or not isinstance(kind, str):
            raise TypeError("name and kind must be strings")
        region = Region(sides, start, stop)
        made = cls(name, kind, shape, region, DTYPES[value["dtype"]], count(value["offset"]), checksums)
        if len(checksums) != -(-made.nbytes // CHUNK):
            raise ValueError(f"{quoted(name)} has {len(checksums)} checksums for {made.nbytes} bytes")
        return made


@dataclass(frozen=True)
class Part:
    """What one rank wrote."""

    rank: int
    """The rank that wrote it."""
    seat: tuple[int, int, int]
    """The rank's ``random_state.Seat``."""
    size: int
    """Bytes of the rank's data file, header included."""
    header: int
    """Bytes of the header, its length included."""
    entries: tuple[Entry, ...]
    """The ranges in the data file, in their order there."""
    scalars: Mapping[str, Any]
    """By parameter: optimizer states that belong to the parameter as a whole, such as the step."""
    values: Mapping[str, Any]
    """This rank's other states: random state and loader. Rank 0 also has the values that all ranks share."""

    def to_json(self) -> dict[str, Any]:
        """The part in an index."""
        return {**vars(self), "entries": [entry.to_json() for entry in self.entries]}

    @classmethod
    def from_json(cls, value: Any) -> Part:
        """Reads and checks a part. Raises KeyError, TypeError or ValueError."""
        entries = tuple(Entry.from_json(entry) for entry in value["entries"])
        header, size = count(value["header"]), count(value["size"])
        if header > LARGEST_HEADER:
            raise ValueError(f"a header of {header} bytes")
        end = 0
        for entry in entries:
            if entry.offset != end or end % entry.dtype.itemsize:
                raise ValueError(f"{quoted(entry.key)} lies at byte {entry.offset}, where {end} is expected")
            end += entry.nbytes
        if header + end != size:
            raise ValueError(f"its ranges take {end} bytes after a header of {header}, but the file {size}")
        for name in ("scalars", "values"):
            if not isinstance(value[name], dict):
                raise TypeError(f"{name} must be a table")
        data, model, degree = (count(number) for number in value["seat"])
        rank, seat = count(value["rank"]), (data, model, degree)
        return cls(rank, seat, size, header, entries, value["scalars"], value["values"])


def count(value: object) -> int:
    """Returns the value if it is a count: a whole number, 0 or more. Raises ValueError if it is not."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{quoted(value)} is no count")
    return value


def shape_from(value: Any) -> tuple[int, ...]:
    """The shape that a list of JSON stands for. Raises TypeError or ValueError if no tensor can have this shape.

    >>> shape_from([2, 0])
    (2, 0)
    """
    if len(value) > MOST_DIMENSIONS:
        raise ValueError(f"a shape of {len(value)} dimensions")
    elements = 1
    for size in value:
        elements *= max(1, count(size))  # sizes beside a 0 count too: torch computes strides from them
        if elements >= MOST_ELEMENTS:
            raise ValueError(f"{elements} is no count of elements, in a shape of {quoted(value)}")
    return tuple(value)


def check_version(value: Any) -> None:
    """Raises KeyError, TypeError or ValueError if an index or a marker is of another version."""
    if value["version"] != VERSION:
        raise ValueError(f"version {quoted(value['version'])}, this zeroshard reads {VERSION}")


def header_of(entries: Sequence[Entry], token: str, rank: int) -> bytes:
    """The header of a rank's data file."""
    tensors = [(entry.key, entry.dtype, (entry.region.numel,), entry.offset) for entry in entries]
    return safetensors_header(tensors, {"checkpoint": token, "rank": str(rank)})


def safetensors_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int], int]], metadata: Mapping[str, str]
) -> bytes:
    """The header of a safetensors file: its length, then JSON, padded so that the data starts on a boundary.

    Args:
        tensors: for each tensor its name, its dtype, its shape, and its first byte, counted from the header's end.
        metadata: any strings.
    """
    table: dict[str, Any] = {"__metadata__": metadata}
    for name, dtype, shape, offset in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": SAFETENSORS[dtype], "shape": list(shape), "data_offsets": [offset, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


class Marker(NamedTuple):
    """The marker of a complete checkpoint: which index belongs to it, and how new it is.

    A killed save leaves a folder without a marker. Such a folder is ignored. A folder whose marker cannot be read is
    damaged. It is never ignored: otherwise an older checkpoint would be loaded silently.
    """

    index_bytes: int
    """The size of ``index.json``."""
    index_sha256: str
    """The checksum of ``index.json``."""
    steps: int
    """Steps that the optimizer has made."""
    saved_ns: int
    """When the checkpoint was completed: nanoseconds since 1970. The newest checkpoint has the highest number."""

    @classmethod
    def of(cls, index: bytes, steps: int, saved_ns: int) -> Marker:
        """The marker of an index."""
        return cls(len(index), hashlib.sha256(index).hexdigest(), steps, saved_ns)

    def to_json(self) -> bytes:
        """The marker's file, to the byte."""
        fields = {"version": VERSION, **self._asdict()}
        return json.dumps({**fields, "sha256": hashlib.sha256(json.dumps(fields).encode()).hexdigest()}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Marker:
        """Reads and checks a marker. Raises KeyError, TypeError, ValueError or RecursionError."""
        value: Any = json.loads(text)
        check_version(value)
        made = cls(count(value["index_bytes"]), value["index_sha256"], count(value["steps"]), count(value["saved_ns"]))
        if made.to_json() != text:
            raise ValueError("it is not what its checksum was written for")
        if made.saved_ns > LATEST_NS:
            raise ValueError(f"saved_ns={made.saved_ns} is a time that no clock has")
        return made


def has_marker(folder: Path) -> bool:
    """True if there is something in the marker's place, readable or not."""
    return os.path.lexists(folder / MARKER)


def read_marker(folder: Path) -> Marker | None:
    """The marker of a folder; None if the folder has none.

    Raises:
        CheckpointError: the marker is damaged.
    """
    file = folder / MARKER
    try:
        with open_plain(file) as opened:
            text = opened.read(LARGEST_MARKER + 1)
        if len(text) > LARGEST_MARKER:
            raise ValueError(f"more than {LARGEST_MARKER} bytes")
        return Marker.from_json(text)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, PermissionError) and not has_marker(folder):  # a folder of another user, as lost+found
            return None
        raise CheckpointError(
            f"{file} is damaged ({told(error)}), so {folder} is not known to be complete, nor how "
            "new it is; name another checkpoint by its own path, or pass allow_older=True; once that folder is moved "
            "away, it is not asked for again"
        ) from error


def open_plain(file: Path) -> BinaryIO:
    """Opens a plain file to read it. Follows no link, and does not wait for a pipe that nobody writes to.

    Raises:
        CheckpointError: the file is a link, a folder, a pipe or a device.
        OSError: the file is not there, or cannot be opened.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP and file.is_symlink():
            raise CheckpointError(
                f"{file} is a link, which a checkpoint does not have; copy the file itself"
            ) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{file} is a folder, a pipe or a device, where a checkpoint has a file")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
