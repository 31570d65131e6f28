"""A marker that is there and not what was written is damage, which is named; never a save that did not end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard import CheckpointError
from zeroshard.cli.main import main
from zeroshard.config.job import load_job
from zeroshard.storage.export import export
from zeroshard.storage.format import LATEST_NS, Marker, read_marker
from zeroshard.train.checkpoints import Start

MARKER, INDEX, DATA = "COMPLETE", "index.json", "rank-00000.safetensors"


def small() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters()))


def two(folder: Path) -> tuple[Any, Any]:
    """Two checkpoints, of which the second is the newer."""
    model, optimizer = small()
    for number in (1, 2):
        zeroshard.save(folder / f"step-{number}", model, optimizer, extra=number)
    return model, optimizer


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def a_link(file: Path) -> None:
    elsewhere = file.rename(file.parent.parent / f"elsewhere-{file.name}")
    file.symlink_to(elsewhere)


def a_link_to_nothing(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.parent / "nothing")


def another_digit(file: Path) -> None:
    saved = json.loads(file.read_text())["saved_ns"]
    file.write_text(file.read_text().replace(str(saved), str(saved - 10**15)))


def another_time(file: Path) -> None:
    marker = read_marker(file.parent)
    assert marker is not None
    file.write_bytes(marker._replace(saved_ns=2**63 - 1).to_json())


def no_checksum(file: Path) -> None:
    fields = json.loads(file.read_text())
    del fields["sha256"]
    file.write_text(json.dumps(fields))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: os.truncate(file, 40),
    "empty": lambda file: os.truncate(file, 0),
    "garbage": lambda file: file.write_bytes(b"\xff\x00garbage"),
    "deeper than the parser goes": lambda file: file.write_text("[" * 4096),
    "long": lambda file: file.write_bytes(file.read_bytes() + b" " * 5000),
    "a list": lambda file: file.write_text('["sha256"]'),
    "a folder": a_folder,
    "a pipe": a_pipe,
    "a link": a_link,
    "a link to nothing": a_link_to_nothing,
    "another digit of its time": another_digit,
    "a time that no clock has": another_time,
    "without a checksum": no_checksum,
    "of another version": lambda file: file.write_text(file.read_text().replace('"version": 2', '"version": 9')),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_marker_is_named_and_an_older_checkpoint_taken_only_where_allowed(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = two(tmp_path)
    DAMAGE[how](tmp_path / "step-2" / MARKER)
    for path in (tmp_path, tmp_path / "step-2"):
        with pytest.raises(CheckpointError, match=f"step-2/{MARKER} is "):
            zeroshard.load(path, model, optimizer)
    with pytest.raises(CheckpointError, match=f"step-2/{MARKER} is "):
        export(tmp_path, tmp_path / "out")
    assert zeroshard.load(tmp_path / "step-1", model, optimizer) == 1
    assert zeroshard.load(tmp_path, model, optimizer, allow_older=True) == 1
    told = capsys.readouterr().out
    assert f"step-2/{MARKER} is " in told
    assert f"taking the one before, {tmp_path / 'step-1'}" in told
    zeroshard.save(tmp_path / "step-3", model, optimizer, extra=3, keep=1)
    assert zeroshard.load(tmp_path / "step-3", model, optimizer) == 3
    assert not (tmp_path / "step-1").exists()
    assert os.path.lexists(tmp_path / "step-2" / MARKER)  # it is no part of what is kept, and not deleted either


def test_a_folder_without_a_marker_is_passed_over(tmp_path: Path) -> None:
    model, optimizer = two(tmp_path)
    (tmp_path / "step-2" / MARKER).unlink()
    assert zeroshard.load(tmp_path, model, optimizer) == 1


@pytest.mark.parametrize("name", [INDEX, DATA])
@pytest.mark.parametrize("how", [a_folder, a_pipe, a_link])
def test_what_is_no_plain_file_is_named_and_not_waited_for(
    how: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    model, optimizer = two(tmp_path)
    how(tmp_path / "step-2" / name)
    with pytest.raises(CheckpointError, match=rf"step-2/{name} is a (link|folder, a pipe)"):
        zeroshard.load(tmp_path, model, optimizer)
    assert zeroshard.load(tmp_path, model, optimizer, allow_older=True) == 1


def test_after_the_latest_time_of_all_saves_go_on(tmp_path: Path) -> None:
    model, optimizer = two(tmp_path)
    marker = read_marker(tmp_path / "step-1")
    assert marker is not None
    (tmp_path / "step-1" / MARKER).write_bytes(marker._replace(saved_ns=LATEST_NS).to_json())
    zeroshard.save(tmp_path / "step-3", model, optimizer, extra=3, keep=2)
    assert zeroshard.load(tmp_path / "step-3", model, optimizer) == 3


def test_a_run_neither_begins_anew_over_damaged_checkpoints_nor_replaces_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two(tmp_path / "checkpoints")
    for number in (1, 2):
        (tmp_path / "checkpoints" / f"step-{number}" / MARKER).write_text("garbage")
    job = load_job("tiny", {"train.device": "cpu", "train.save_every": 4})
    with pytest.raises(CheckpointError, match=f"{MARKER} is damaged"):
        Start.find(job, tmp_path, "auto", 1)
    assert main(["train", "tiny", "--device", "cpu", "--save-every", "4", "--out", str(tmp_path)]) == 2
    assert "checkpoints of an earlier run, which this one would replace" in capsys.readouterr().err


def test_a_marker_reads_back_as_it_was_written() -> None:
    marker = Marker.of(b"index", 3, 5)
    assert Marker.from_json(marker.to_json()) == marker
