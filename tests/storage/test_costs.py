"""A small forged checkpoint is refused at a small cost: little time, little memory, a short message."""

from __future__ import annotations

import os
import shutil
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.storage.forging import forge, index_of
from zeroshard import CheckpointError
from zeroshard.storage import format as storage_format
from zeroshard.storage import limits, read, write
from zeroshard.storage.format import CHUNK, INDEX, MARKER, Entry, Marker, data_file, header_of
from zeroshard.storage.load import read_extra
from zeroshard.storage.regions import Region, flaw

LONGEST = 3000
"""Characters of the longest message."""


def small() -> tuple[Any, Any]:
    model = nn.Linear(4, 4)
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters()))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "saved"
    zeroshard.save(folder, *small(), extra={"large": torch.arange(4000)})
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "saved"))


@contextmanager
def cheap(seconds: float = 5, memory: int = 1 << 28) -> Iterator[None]:
    """The block takes little time, and Python little memory."""
    tracemalloc.start(1)
    begin = time.monotonic()
    try:
        yield
        assert time.monotonic() - begin < seconds
        assert tracemalloc.get_traced_memory()[1] < memory
    finally:
        tracemalloc.stop()


def refused(folder: Path, match: str) -> None:
    model, optimizer = small()
    with cheap(), pytest.raises(CheckpointError, match=match) as raised:
        zeroshard.load(folder, model, optimizer)
    assert len(str(raised.value)) < LONGEST
    assert str(raised.value).isprintable()


def values(index: Any) -> Any:
    return index["parts"][0]["values"]


def entry(index: Any) -> Any:
    return index["parts"][0]["entries"][0]


def tensor(shape: Any) -> Any:
    return {"$": "tensor", "dtype": "F32", "shape": shape, "bits": ""}


HUGE = int("9" * 4000)

FORGERIES: dict[str, tuple[Any, str]] = {
    "a shape of huge numbers": (lambda v: values(v).update(extra=tensor([HUGE] * 1000)), "extra of rank 0"),
    "few huge sizes": (lambda v: values(v).update(extra=tensor([HUGE] * 60)), "is no count"),
    "sizes of text": (lambda v: values(v).update(extra=tensor(["9" * 4000])), "is no count"),
    "sizes beside a 0": (lambda v: values(v).update(extra=tensor([0, 2**61, 2**61])), "is no count"),
    "a long name": (lambda v: entry(v).update(name="x" * 10**6), "belongs to a parameter|lacks|another header|missing"),
    "a name of control characters": (
        lambda v: entry(v).update(kind="\x1b[2J\n" * 100),
        "another header|lacks",
    ),
    "a kind that is long": (
        lambda v: entry(v).update(kind="state " + "y" * 10**6),
        "belongs to|lacks|missing",
    ),
    "a long dtype": (lambda v: entry(v).update(dtype="z" * 10**6), "KeyError"),
    "a long offset": (lambda v: entry(v).update(offset="\n" * 10**6), "is no count"),
    "a box of many sides": (lambda v: entry(v).update(box=[[0, 1]] * 10**5), "a box of 100000 sides"),
    "a long version": (lambda v: v.update(version="v" * 10**6), "version 'v"),
    "a long token": (lambda v: v.update(checkpoint="t" * 10**6), "names no checkpoint"),
    "a value of a long kind": (lambda v: values(v).update(extra={"$": "k\n" * 10**5}), "does not know"),
    "keys of one hash": (
        lambda v: values(v).update(extra={"$": "dict", "items": [[n * (2**61 - 1), 0] for n in range(100_000)]}),
        "chosen to make it slow",
    ),
    "a large tensor named twice": (
        lambda v: values(v).update(extra=[values(v)["extra"]["large"]] * 2),
        "is used twice",
    ),
    "a setting that is long": (
        lambda v: values(v)["shared"]["groups"][0]["settings"].update(lr="\n" * 10**6),
        r"settings\.lr",
    ),
    "a table with a long name": (lambda v: v["parts"][0]["scalars"].update({"n" * 10**6: {}}), "which is no parameter"),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_forged_index_is_refused_soon_and_in_one_short_line(what: str, saved: Path) -> None:
    edit, match = FORGERIES[what]
    forge(saved, edit)
    refused(saved, match)


def test_many_parts_of_a_parameter_are_checked_in_little_time() -> None:
    count = 20_000
    rows = [Region(((row, row + 1), (0, 3)), 0, 3) for row in range(count)]
    with cheap():
        assert flaw((count, 3), rows) is None
        shifted = [*rows[:-1], Region(((0, 1), (0, 3)), 0, 3)]
        assert flaw((count, 3), shifted) == "parts of it are missing"
        crossed = [*rows[:-1], Region(((0, 3), (0, 1)), 0, 3)]
        assert flaw((count, 3), crossed) is not None


def hollow(folder: Path, size: int) -> None:
    """The data file gets a tensor of zeros, as a hole, which the values name."""
    value = index_of(folder)
    part = value["parts"][0]
    data = (folder / data_file(0)).read_bytes()[part["header"] :]
    data += b"\0" * (-len(data) % 64)
    whole, rest = divmod(size, CHUNK)
    checksums = [zlib.crc32(bytes(CHUNK))] * whole + [zlib.crc32(bytes(rest))] * bool(rest)
    padding = len(data) - sum(Entry.from_json(one).nbytes for one in part["entries"])
    added = [("padding", padding, [zlib.crc32(b"\0" * padding)] * bool(padding)), ("hole", size, checksums)]
    offset = len(data) - padding
    for name, length, sums in added:
        part["entries"].append(
            {"name": name, "kind": "tensor of rank 0", "shape": [length], "range": [0, length], "dtype": "U8"}
            | {"offset": offset, "crc32": sums}
        )
        offset += length
    header = header_of([Entry.from_json(one) for one in part["entries"]], value["checkpoint"], 0)
    part.update(header=len(header), size=len(header) + len(data) + size)
    part["values"]["extra"] = {"$": "large", "name": "hole"}
    with open(folder / data_file(0), "wb") as file:
        file.write(header + data)
        file.truncate(part["size"])
    forge(folder, lambda _: value)


def test_a_file_that_is_a_hole_takes_no_memory(saved: Path) -> None:
    hollow(saved, 1 << 33)
    assert os.stat(saved / data_file(0)).st_blocks * 512 < 1 << 20
    refused(saved, f"{data_file(0)} has values of 8.59 GB, and all but .* of the file are holes")
    with pytest.raises(CheckpointError, match="are holes"):
        read_extra(saved)


def test_large_values_that_were_written_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "FREE_HOLES", 0)
    zeroshard.save(tmp_path / "saved", *small(), extra=torch.zeros(1 << 20))
    assert torch.equal(zeroshard.load(tmp_path / "saved", *small()), torch.zeros(1 << 20))


def test_columns_are_read_in_little_memory_from_any_number_of_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that divides matrices by columns reads a checkpoint of whole matrices."""
    for module in (storage_format, read, write):
        monkeypatch.setattr(module, "CHUNK", 64)
    model, _ = zeroshard.shard(nn.Linear(7, 33).requires_grad_(False))
    zeroshard.save(tmp_path / "saved", model)
    weight = zeroshard.full_state_dict(model)["weight"]
    monkeypatch.setattr(torch, "cat", short := Short())
    reader = read.CheckpointReader(read.read_index(tmp_path / "saved"))
    for low, high in ((0, 1), (2, 5), (0, 7)):
        target = torch.zeros(33 * (high - low))
        reader.read("weight", "value", Region(((0, 33), (low, high)), 0, target.numel()), target)
        assert torch.equal(target.view(33, -1), weight[:, low:high])
    assert short.longest <= 16


class Short:
    """``torch.cat``, which remembers its longest result."""

    def __init__(self) -> None:
        self.longest, self._cat = 0, torch.cat

    def __call__(self, parts: list[torch.Tensor]) -> torch.Tensor:
        made = self._cat(parts)
        self.longest = max(self.longest, made.numel())
        return made


def test_a_small_hole_is_loaded(saved: Path) -> None:
    hollow(saved, 1 << 20)
    assert torch.equal(zeroshard.load(saved, *small()), torch.zeros(1 << 20, dtype=torch.uint8))


def test_an_index_far_larger_than_the_model_needs_is_not_parsed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"[" + b"[]," * (30 << 20) + b"[]]"
    (saved / INDEX).write_bytes(text)
    (saved / MARKER).write_bytes(Marker.of(text, 1, 1).to_json())
    monkeypatch.setattr(read, "open_plain", None)  # the index is not even read
    refused(saved, "speaks of an index of 94.4 MB, and what is here can need .* at most")


def test_an_index_of_nothing_but_lists_is_not_parsed(saved: Path) -> None:
    text = b"[" + b"[]," * (20 << 20) + b"[]]"
    (saved / INDEX).write_bytes(text)
    (saved / MARKER).write_bytes(Marker.of(text, 1, 1).to_json())
    refused(saved, f"{INDEX} has 20971522 lists and tables")
    with cheap(), pytest.raises(CheckpointError, match="lists and tables"):
        read_extra(saved)


def test_a_save_says_if_its_index_would_be_too_large_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FREE_INDEX_BYTES", 1 << 16)
    with pytest.raises(CheckpointError, match=r"was not saved.*scheduler, loader or extra.*tensors"):
        zeroshard.save(tmp_path / "saved", *small(), extra=["x" * 100] * 20_000)
    assert not list(tmp_path.iterdir())
