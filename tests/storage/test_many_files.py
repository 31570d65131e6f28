"""A checkpoint of more ranks than a process may have files open."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from zeroshard.storage.contents import Contents, Item
from zeroshard.storage.format import INDEX, MARKER, VALUE, Entry, Marker, part_file
from zeroshard.storage.random_state import Seat
from zeroshard.storage.read import OPEN_FILES, CheckpointReader, index_json, read_index
from zeroshard.storage.regions import Region
from zeroshard.storage.write import write_part, write_whole

RANKS = 2 * OPEN_FILES + 5


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def one_element_a_rank(folder: Path) -> None:
    parts = []
    for rank in range(RANKS):
        region = Region(((0, RANKS),), rank, rank + 1)
        element = torch.tensor([float(rank)])
        item = Item(Entry("p", VALUE, (RANKS,), region, torch.float32), lambda e=element: e)
        write_part(folder, "ab", rank, Contents([item], {}, {}, Seat(rank, 0, 1)))
        parts.append(json.loads((folder / part_file(rank)).read_text()))
    index = index_json("ab", parts)
    write_whole(folder / INDEX, index)
    write_whole(folder / MARKER, Marker.of(index, 0, 1).to_json())


def test_files_are_checked_without_staying_open_and_few_are_open_at_once(tmp_path: Path) -> None:
    one_element_a_rank(tmp_path)
    before = opened()
    reader = CheckpointReader(read_index(tmp_path))
    reader.check_files()
    assert opened() == before
    found = torch.empty(RANKS)
    reader.read("p", VALUE, Region(((0, RANKS),), 0, RANKS), found)
    assert torch.equal(found, torch.arange(float(RANKS)))
    assert opened() <= before + OPEN_FILES
    del reader
    assert opened() == before
