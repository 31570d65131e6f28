"""How large an index may be: a small forged file must not take the memory of a large model.

An index is parsed as a whole, and JSON takes up to thirty times its bytes in memory. So its size is bounded by what the
model that loads can need, before it is parsed. A save refuses what a load would refuse.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..system.sizes import size_text
from .format import DATA_NAME, LARGEST_JSON

FREE_INDEX_BYTES = 64 << 20
"""Bytes that an index may have in any case: for values of the user, such as a list of all losses."""
INDEX_BYTES_OF_RANK = 1 << 20
"""Bytes of an index that one rank may add: random state and loader."""
INDEX_BYTES_OF_TENSOR = 4096
"""Bytes of an index that one rank may add for a parameter or buffer: a range of each of its states."""
BYTES_OF_CONTAINER = 16
"""Least bytes of an index for each of its lists and tables. An empty list has two, and takes 30 times that memory."""
DISK_BLOCK = 512
"""Bytes that ``st_blocks`` counts in."""


def largest_index(ranks: int, tensors: int) -> int:
    """Bytes of the largest index of a model with so many parameters and buffers, if so many ranks saved it."""
    return min(LARGEST_JSON, FREE_INDEX_BYTES + ranks * (INDEX_BYTES_OF_RANK + tensors * INDEX_BYTES_OF_TENSOR))


def largest_index_in(folder: Path, tensors: int | None) -> int:
    """Bytes of the largest index that a folder may have, for a model of so many parameters and buffers.

    If there is no model, the index may be as large as the data, beside what any index may have. Raises OSError.
    """
    with os.scandir(folder) as entries:
        files = [entry.stat(follow_symlinks=False) for entry in entries if DATA_NAME.fullmatch(entry.name)]
    if tensors is not None:
        return largest_index(len(files), tensors)
    return min(LARGEST_JSON, largest_index(len(files), 0) + sum(file.st_blocks * DISK_BLOCK for file in files))


def excess_of(index: bytes, largest: int) -> str | None:
    """Says what an index has too much of; None if it is not too large."""
    if len(index) > largest:
        return f"{size_text(len(index))} of JSON, where {size_text(largest)} are enough for this model"
    containers = index.count(b"[") + index.count(b"{")  # far faster than to parse
    if containers > largest // BYTES_OF_CONTAINER:
        return f"{containers} lists and tables, where {largest // BYTES_OF_CONTAINER} are enough for this model"
    return None
