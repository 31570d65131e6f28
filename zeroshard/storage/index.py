"""All parts of a checkpoint together: the index, checked when read."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .boxes import flaw
from .format import INDEX, LARGEST_JSON, MARKER, VALUE, VERSION, CheckpointError, Entry, Part, is_of_parameter
from .marker import read_marker
from .plain import open_plain


class Located(NamedTuple):
    """An entry, and whose file it is in."""

    rank: int
    entry: Entry


class Index:
    """A complete checkpoint's index, checked: every state of every parameter is there, each element once."""

    def __init__(self, folder: Path, token: str, parts: Sequence[Part]) -> None:
        self.folder, self.token, self.parts = folder, token, tuple(parts)
        self.places: dict[tuple[str, str], list[Located]] = {}
        for part in parts:
            for entry in part.entries:
                self.places.setdefault((entry.name, entry.kind), []).append(Located(part.rank, entry))
        self.kinds: dict[str, list[str]] = {}
        """What there is of each parameter."""
        for name, kind in self.places:
            if is_of_parameter(kind):
                self.kinds.setdefault(name, []).append(kind)
        self.scalars: dict[str, Any] = {}
        for part in parts:
            self.scalars.update(part.scalars)

    @property
    def values(self) -> Mapping[str, Any]:
        """What all ranks share."""
        return self.parts[0].values

    def shape(self, name: str, kind: str = VALUE) -> tuple[int, ...]:
        """Of a parameter, or of something else that is whole."""
        return self.places[name, kind][0].entry.shape

    def dtype(self, name: str, kind: str = VALUE) -> torch.dtype:
        """In which it is stored."""
        return self.places[name, kind][0].entry.dtype

    def check(self) -> None:
        """Raises ValueError where ranges overlap, are missing or contradict each other."""
        for (name, kind), places in self.places.items():
            first = places[0].entry
            for _, entry in places:
                if (entry.shape, entry.dtype) != (first.shape, first.dtype):
                    raise ValueError(f"{name!r} ({kind}) is stored with two shapes or dtypes")
            if is_of_parameter(kind):
                if (name, VALUE) not in self.places:
                    raise ValueError(f"{name!r} ({kind}) belongs to a parameter that is not there")
                if first.shape != self.shape(name):
                    raise ValueError(f"{name!r} ({kind}) has shape {first.shape}, the parameter {self.shape(name)}")
            wrong = flaw(first.shape, [entry.region for _, entry in places])
            if wrong is not None:
                raise ValueError(f"{name!r} ({kind}): {wrong}")


def index_json(token: str, parts: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> bytes:
    """The index of all parts."""
    whole = {"version": VERSION, "checkpoint": token, **about, "parts": list(parts)}
    return json.dumps(whole, separators=(",", ":")).encode()


def read_index(folder: Path) -> Index:
    """Reads and checks the index of a complete checkpoint. No data is read."""
    marker = read_marker(folder)
    if marker is None:
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MARKER}")
    file = folder / INDEX
    try:
        if marker.index_bytes > LARGEST_JSON:
            raise CheckpointError(f"{folder / MARKER} speaks of an index of {marker.index_bytes} bytes")
        with open_plain(file) as opened:
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
