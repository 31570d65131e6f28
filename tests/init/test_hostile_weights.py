"""``weights=`` from files that somebody else wrote: every field is checked, and no file ends the process."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zeroshard

ESCAPE = "\x1b]0;owned\x07"


def layer() -> nn.Module:
    return nn.Linear(4, 3)


def read(path: Path, model: nn.Module | None = None, **options: Any) -> Any:
    model = layer() if model is None else model
    return zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), weights=path, **options)[0]


def refused(path: Path, told: str, model: nn.Module | None = None, **options: Any) -> None:
    """The error names the file, says what is wrong, and is one line that does nothing to a terminal."""
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        read(path, model, **options)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def raw(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def tensor(begin: int, end: int, *shape: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


RIGHT = {"weight": tensor(0, 48, 3, 4), "bias": tensor(48, 60, 3)}


def file_of(folder: Path, header: object, data: bytes = bytes(60)) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(raw(header if isinstance(header, bytes) else json.dumps(header).encode(), data))
    return file


def test_a_header_that_is_right_is_read(tmp_path: Path) -> None:
    read(file_of(tmp_path, {"__metadata__": {"format": "pt"}, **RIGHT}))


HEADERS: dict[str, tuple[object, str]] = {
    "nested": (b"{" + b'"a":{' * 100_000, "nested too deep"),
    "nested lists": (b'{"a":' + b"[" * 100_000, "nested too deep"),
    "a list": (b"[]", "its header is not JSON"),
    "no utf-8": (b'{"\xff": 1}', "is not UTF-8"),
    "twice": (b'{"bias": 1, "bias": 2}', "a table has the key 'bias' twice"),
    "a number": (RIGHT | {"bias": 3}, "the entry of 'bias' is 3"),
    "no shape": (RIGHT | {"bias": {"dtype": "F32", "data_offsets": [48, 60]}}, "the entry of 'bias' is {'dtype'"),
    "a shape of text": (RIGHT | {"bias": tensor(48, 60, "3")}, "the entry of 'bias' is"),
    "a shape of truth": (RIGHT | {"bias": tensor(48, 60, True, 3)}, "the entry of 'bias' is"),
    "a negative shape": (RIGHT | {"bias": tensor(48, 60, -1, -3)}, "the entry of 'bias' is"),
    "a shape that overflows": (RIGHT | {"bias": tensor(48, 48, *[1 << 62] * 40)}, "and 0 bytes"),
    "a size of too many bits": (RIGHT | {"bias": tensor(48, 48, 1 << 64, 0)}, "the entry of 'bias' is"),
    "too many dimensions": (RIGHT | {"bias": tensor(48, 60, *[1] * 1000, 3)}, "'bias' has dtype 'F32' and shape [1, "),
    "no dtype": (RIGHT | {"bias": tensor(48, 60, 3, dtype=[])}, "'bias' has dtype []"),
    "an unknown dtype": (RIGHT | {"bias": tensor(48, 60, 3, dtype=ESCAPE)}, r"'bias' is '\x1b]0;owned\x07' in model"),
    "another size": (RIGHT | {"bias": tensor(48, 60, 4)}, "'bias' has shape [4] in F32, and 12 bytes"),
    "negative offsets": (RIGHT | {"bias": tensor(-12, 0, 3)}, "the entry of 'bias' is"),
    "offsets backwards": (RIGHT | {"bias": tensor(60, 48, 3)}, "'bias' has shape [3] in F32, and -12 bytes"),
    "three offsets": (RIGHT | {"bias": tensor(48, 60, 3) | {"data_offsets": [48, 60, 72]}}, "the entry of 'bias' is"),
    "offsets that overlap": (RIGHT | {"bias": tensor(36, 48, 3)}, "'bias' is at bytes 36 to 48, where 48 comes next"),
    "offsets with a gap": (RIGHT | {"bias": tensor(52, 64, 3)}, "'bias' is at bytes 52 to 64, where 48 comes next"),
    "offsets past the end": (RIGHT | {"more": tensor(60, 72, 3)}, "its tensors have 72 bytes, and the file has 60"),
    "fractions": (RIGHT | {"bias": tensor(48, 60, 3.0)}, "the entry of 'bias' is"),
    "a number of many digits": (b'{"bias": ' + b"1" * 5000 + b"}", "not JSON: Exceeds the limit"),
    "escapes": (RIGHT | {ESCAPE: tensor(60, 60, 0)}, r"it has '\x1b]0;owned\x07', which the model has not"),
    "a long name": (RIGHT | {"x" * 10**6: tensor(60, 60, 0)}, "which the model has not"),
    "half a character": (RIGHT | {"\ud800": tensor(60, 60, 0)}, r"it has '\ud800', which the model has not"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_makes_no_sense_is_refused(what: str, tmp_path: Path) -> None:
    header, told = HEADERS[what]
    refused(file_of(tmp_path, header), told)


@pytest.mark.parametrize("length", [2**64 - 1, 2**40, 200_000_000, 61])
def test_a_header_that_is_longer_than_the_file_or_than_any_is_not_read(length: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with open(file, "wb") as opened:
        opened.write(raw(b"", bytes(60), length))
        opened.truncate(300_000_000 if length == 200_000_000 else 68)
    refused(file, f"begins with a header of {length} bytes")


@pytest.mark.parametrize("size", range(8))
def test_a_file_that_ends_before_its_header_is_refused(size: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(size))
    refused(file, f"it has {size} bytes")


INDICES: dict[str, tuple[bytes, str]] = {
    "nested": (b"[" * 100_000, "nested too deep"),
    "nested tables": (b'{"weight_map":' * 100_000, "nested too deep"),
    "a list": (b"[]", "it needs a table 'weight_map'"),
    "a map of numbers": (b'{"weight_map": {"bias": 3}}', "it needs a table 'weight_map' of file names"),
    "a map of text": (b'{"weight_map": "bias"}', "it needs a table 'weight_map'"),
    "twice": (b'{"weight_map": {"bias": "a", "bias": "b"}}', "a table has the key 'bias' twice"),
    "no utf-8": (b'{"weight_map": {"\xff": "a"}}', "is not UTF-8"),
    "escapes": (b'{"weight_map": {"\\u001b[2J": "\\u001b[3J"}}', r"puts '\x1b[2J' into '\x1b[3J', which is not there"),
    "a long name": (b'{"weight_map": {"bias": "' + b"x" * 10_000 + b'"}}', "which is not there"),
    "no name": (b'{"weight_map": {"bias": "a\\u0000b"}}', "which is not there"),
    "half a character": (b'{"weight_map": {"bias": "\\ud800"}}', "which is not there"),
}


@pytest.mark.parametrize("what", INDICES)
def test_an_index_that_makes_no_sense_is_refused(what: str, tmp_path: Path) -> None:
    content, told = INDICES[what]
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    refused(tmp_path, told)


def test_tied_weights_of_two_dtypes_are_compared(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        return model

    ones = torch.ones(4, 4)
    save_file({"0.weight": ones, "1.weight": ones.bfloat16()}, tmp_path / "model.safetensors")
    assert torch.equal(zeroshard.full_state_dict(read(tmp_path, tied()))["0.weight"], ones)
    save_file({"0.weight": ones, "1.weight": 2 * ones.bfloat16()}, tmp_path / "model.safetensors")
    refused(tmp_path, "are one tied weight in the model, but differ on disk", tied())


class Masked(nn.Module):
    """Has a buffer that is in no file, so ``init`` runs after the headers are read and before the elements are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(600, 600), nn.Linear(600, 600)
        self.register_buffer("mask", torch.ones(2), persistent=False)


@pytest.mark.parametrize("left", [0, 100, 1_500_000])
def test_a_file_that_shrinks_after_its_header_was_read_is_named(left: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(Masked().state_dict(), file)

    def shrink(module: nn.Module) -> None:
        if isinstance(module, Masked):
            module.mask.fill_(1)
            os.truncate(file, left)

    with torch.device("meta"):
        model = Masked()
    refused(file, "model.safetensors became shorter while it was read", model, init=shrink)


@pytest.mark.parametrize("left", [0, 1_500_000])
def test_a_file_that_shrinks_while_its_elements_are_read_does_not_kill_the_process(
    left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    save_file(Masked().state_dict(), file)
    real: Callable[..., int] = os.preadv

    def shrinking(*arguments: Any) -> int:
        os.truncate(file, left)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", shrinking)
    refused(file, "model.safetensors became shorter while it was read", Masked())
