"""Checkpoints that somebody edited: every checksum is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeroshard.storage.format import INDEX, MARKER, Entry, Marker, data_file, header_of


def index_of(folder: Path) -> Any:
    return json.loads((folder / INDEX).read_text())


def forge(folder: Path, edit: Callable[[Any], Any]) -> None:
    """Changes the index, and the marker with it."""
    value = index_of(folder)
    value = edit(value) or value
    text = json.dumps(value).encode()
    (folder / INDEX).write_bytes(text)
    (folder / MARKER).write_bytes(Marker.of(text, 1, 1).to_json())


def forge_entries(folder: Path, edit: Callable[[Any], Any]) -> None:
    """Changes or, where ``edit`` returns None, drops ranges of rank 0, and the data file with them."""
    value = index_of(folder)
    part = value["parts"][0]
    file = folder / data_file(0)
    data = file.read_bytes()[part["header"] :]
    kept, written = [], b""
    for entry in part["entries"]:
        there = Entry.from_json(entry)
        edited = edit(dict(entry))
        if edited is not None:
            kept.append({**edited, "offset": len(written)})
            written += data[there.offset : there.offset + there.nbytes]
    header = header_of([Entry.from_json(entry) for entry in kept], value["checkpoint"], 0)
    file.write_bytes(header + written)
    part.update(entries=kept, header=len(header), size=len(header) + len(written))
    forge(folder, lambda _: value)
