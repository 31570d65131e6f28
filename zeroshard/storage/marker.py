"""The marker of a complete checkpoint: which index belongs to it, how new it is, and a checksum of its own.

A folder without one is what a killed save leaves, and is passed over. One that is there and is not what was written
is damage: it is never taken for a save that did not end, or an older checkpoint would be taken in silence.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from .format import MARKER, VERSION, CheckpointError, count
from .plain import open_plain

LARGEST = 4096
LATEST_NS = 2**62
"""In the year 2116. A later time is no clock's; and after the last number of all no save could come any more."""


class Marker(NamedTuple):
    """What a marker says."""

    index_bytes: int
    index_sha256: str
    steps: int
    saved_ns: int

    @classmethod
    def of(cls, index: bytes, steps: int, saved_ns: int) -> Marker:
        """The marker of an index."""
        return cls(len(index), hashlib.sha256(index).hexdigest(), steps, saved_ns)

    def to_json(self) -> bytes:
        """As it is written, to the byte."""
        fields = {"version": VERSION, **self._asdict()}
        return json.dumps({**fields, "sha256": hashlib.sha256(json.dumps(fields).encode()).hexdigest()}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Marker:
        """Checked; raises KeyError, TypeError, ValueError or RecursionError."""
        value: Any = json.loads(text)
        if "sha256" not in value:
            raise ValueError("it has no checksum of its own, which no released zeroshard left out")
        if value["version"] != VERSION:
            raise ValueError(f"version {value['version']!r}, this zeroshard reads {VERSION}")
        made = cls(count(value["index_bytes"]), value["index_sha256"], count(value["steps"]), count(value["saved_ns"]))
        if not isinstance(made.index_sha256, str) or not re.fullmatch("[0-9a-f]{64}", made.index_sha256):
            raise ValueError("the index's checksum is none")
        if made.to_json() != text:
            raise ValueError("it is not what its checksum was written for")
        if made.saved_ns > LATEST_NS:
            raise ValueError(f"saved_ns={made.saved_ns} is a time that no clock has")
        return made


def has_marker(folder: Path) -> bool:
    """Whether there is something in the marker's place, readable or not."""
    return os.path.lexists(folder / MARKER)


def read_marker(folder: Path) -> Marker | None:
    """The marker of a folder; None if it has none, or is none of ours to look into.

    Raises:
        CheckpointError: it has one, which is damaged.
    """
    file = folder / MARKER
    try:
        with open_plain(file) as opened:
            text = opened.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise ValueError(f"more than {LARGEST} bytes")
        return Marker.from_json(text)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, PermissionError) and not has_marker(folder):  # such as lost+found
            return None
        raise CheckpointError(
            f"{file} is damaged ({type(error).__name__}: {error}), so {folder} is not known to be complete, nor how "
            "new it is; name another checkpoint by its own path, or pass allow_older=True; once that folder is moved "
            "away, it is not asked for again"
        ) from error
