"""A checkpoint of more ranks than a process may have files open."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from zeroshard.storage.boxes import Region
from zeroshard.storage.format import INDEX, MARKER, VALUE, part_file
from zeroshard.storage.index import index_json, read_index
from zeroshard.storage.marker import Marker
from zeroshard.storage.read import KEPT_OPEN, Reader
from zeroshard.storage.write import Held, write_json, write_part

RANKS = 2 * KEPT_OPEN + 5


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def one_element_a_rank(folder: Path) -> None:
    parts = []
    for rank in range(RANKS):
        region = Region(((0, RANKS),), rank, rank + 1)
        element = torch.tensor([float(rank)])
        write_part(folder, "ab", rank, [Held("p", VALUE, (RANKS,), region, torch.float32, lambda e=element: e)], {}, {})
        parts.append(json.loads((folder / part_file(rank)).read_text()))
    index = index_json("ab", parts, {"world": RANKS, "steps": 0})
    write_json(folder / INDEX, index)
    write_json(folder / MARKER, Marker.of(index, 0, 1).to_json())


def test_files_are_checked_without_staying_open_and_few_are_mapped_at_once(tmp_path: Path) -> None:
    one_element_a_rank(tmp_path)
    before = opened()
    reader = Reader(read_index(tmp_path))
    reader.check_files()
    assert opened() == before
    found = torch.empty(RANKS)
    reader.read("p", VALUE, Region(((0, RANKS),), 0, RANKS), found)
    assert torch.equal(found, torch.arange(float(RANKS)))
    assert opened() <= before + KEPT_OPEN
    del reader
    assert opened() == before
