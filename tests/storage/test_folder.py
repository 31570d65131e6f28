"""Where a save may write: it takes a checkpoint's place and nothing else's, and never its neighbour's."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.ranks import Pool
from tests.storage.runs import Run
from zeroshard import CheckpointError
from zeroshard.storage import background, write
from zeroshard.storage.folder import complete_in
from zeroshard.storage.format import read_marker


def small() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters()))


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", ["thesis.txt", "claim", "index.json", "rank-00000.safetensors/x"])
def test_a_folder_that_is_no_checkpoint_is_left_alone(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("precious")
    with pytest.raises(CheckpointError, match=r"work holds '.*', which is no part of a checkpoint"):
        zeroshard.save(folder, *small())
    assert (folder / name).read_text() == "precious"
    assert [entry.name for entry in tmp_path.iterdir()] == ["work"]


def test_a_folder_of_checkpoints_a_file_and_a_link_are_not_replaced(tmp_path: Path) -> None:
    model, optimizer = small()
    zeroshard.save(tmp_path / "all" / "step-1", model, optimizer)
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "all" / "step-1")
    before = contents(tmp_path)
    for name, match in (("all", "holds 'step-1'"), ("file", "is a file"), ("link", "is a link.*save to .*step-1")):
        with pytest.raises(CheckpointError, match=match):
            zeroshard.save(tmp_path / name, model, optimizer)
    assert contents(tmp_path) == before


def test_a_checkpoint_and_an_empty_folder_are_replaced(tmp_path: Path) -> None:
    model, optimizer = small()
    (tmp_path / "saved").mkdir()
    for number in range(2):
        zeroshard.save(tmp_path / "saved", model, optimizer, extra=number)
        assert zeroshard.load(tmp_path / "saved", model, optimizer) == number
        assert contents(tmp_path / "saved") == ["COMPLETE", "index.json", "rank-00000.safetensors"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_what_comes_up_at_the_path_while_a_save_goes_on_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def also_puts_a_file_there(*arguments: Any) -> None:
        real(*arguments)
        (tmp_path / "saved").mkdir()
        (tmp_path / "saved" / "thesis.txt").write_text("precious")

    real = background.write_part
    monkeypatch.setattr(background, "write_part", also_puts_a_file_there)
    with pytest.raises(CheckpointError, match=r"holds 'thesis.txt'"):
        zeroshard.save(tmp_path / "saved", *small())
    assert (tmp_path / "saved" / "thesis.txt").exists()
    (tmp_path / "saved" / "thesis.txt").rename(tmp_path / "thesis.txt")
    zeroshard.load(tmp_path / "saved", *small())  # it was complete, so it was not removed


def test_notes_inside_a_checkpoint_that_is_one_too_many_stay(tmp_path: Path) -> None:
    model, optimizer = small()
    zeroshard.save(tmp_path / "step-1", model, optimizer)
    (tmp_path / "step-1" / "notes.txt").write_text("precious")
    zeroshard.save(tmp_path / "step-2", model, optimizer, keep=1)
    assert contents(tmp_path / "step-1") == ["notes.txt"]


def test_the_checkpoint_just_written_is_the_newest_and_kept_though_the_clock_went_back(tmp_path: Path) -> None:
    model, optimizer = small()
    zeroshard.save(tmp_path / "step-1", model, optimizer)
    marker = read_marker(tmp_path / "step-1")
    assert marker is not None
    later = marker._replace(saved_ns=marker.saved_ns + 3600 * 10**9)
    (tmp_path / "step-1" / "COMPLETE").write_bytes(later.to_json())
    zeroshard.save(tmp_path / "step-2", model, optimizer)
    assert [one.folder.name for one in complete_in(tmp_path)] == ["step-2", "step-1"]
    zeroshard.save(tmp_path / "step-3", model, optimizer, keep=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-3"]


def test_a_write_that_fails_behind_the_writer_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reports it once, to the flush in the middle; the one at the end finds nothing wrong."""
    told = threading.Event()

    def fails(_: int) -> None:
        told.set()
        raise OSError(5, "Input/output error")

    real = write._write_chunk

    def and_waits(descriptor: int, chunk: memoryview) -> int:
        if flushers:
            told.wait(10)
        flushers.append(1)
        return real(descriptor, chunk)

    flushers: list[int] = []
    monkeypatch.setattr(os, "fdatasync", fails)
    monkeypatch.setattr(write, "FLUSH_BYTES", 1)
    monkeypatch.setattr(write, "_write_chunk", and_waits)
    with pytest.raises(CheckpointError, match="Input/output error"):
        zeroshard.save(tmp_path / "saved", *small())
    assert told.is_set()
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(("code", "fatal"), [(errno.EIO, True), (errno.EINVAL, False), (errno.ENOTSUP, False)])
def test_a_folder_whose_names_cannot_be_made_durable_fails_the_save_unless_its_file_system_has_no_such_thing(
    code: int, fatal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = small()
    zeroshard.save(tmp_path / "saved", model, optimizer, extra="before")
    folders, real = [], os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            folders.append(descriptor)
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    if fatal:
        with pytest.raises(CheckpointError, match=r"Input/output error, when its names were to be made durable.*saved"):
            zeroshard.save(tmp_path / "saved", model, optimizer, extra="after")
    else:
        zeroshard.save(tmp_path / "saved", model, optimizer, extra="after")
    assert folders
    monkeypatch.undo()
    assert zeroshard.load(tmp_path / "saved", model, optimizer) == ("before" if fatal else "after")


def test_two_saves_to_one_path_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write_part = threading.Event(), background.write_part

    def waits(*arguments: Any) -> None:
        gate.wait(60)
        write_part(*arguments)

    monkeypatch.setattr(background, "write_part", waits)
    path = tmp_path / "saved"
    first = zeroshard.save(path, *small(), asynchronous=True)
    with pytest.raises(CheckpointError, match="saved is still being written by another save"):
        zeroshard.save(path, *small())
    gate.set()
    first.wait()
    zeroshard.save(path, *small())
    zeroshard.load(path, *small())


def test_saves_to_one_path_by_two_jobs_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    write_part = background.write_part

    def looks(folder: Path, *arguments: Any) -> None:
        seen.append(folder.name)
        write_part(folder, *arguments)

    monkeypatch.setattr(background, "write_part", looks)
    for _ in range(2):
        zeroshard.save(tmp_path / "saved", *small())
    assert len(set(seen)) == 2


def fails_on_rank_one(folder: str) -> list[str]:
    """Returns the names under which rank 1 wrote, after its part could not be written."""
    names: list[str] = []
    real = os.replace

    def looks(source: Path, target: Path) -> None:
        names.append(source.name)
        assert "File too large" in source.read_text()
        real(source, target)

    def full(*_: Any) -> None:
        raise OSError(27, "File too large")

    run = Run({"stage": 2})
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(background, "write_part", full)
            patch.setattr(os, "replace", looks)
        with pytest.raises(CheckpointError, match=r"rank 1 failed: OSError: .*File too large; make room there"):
            run.save(folder)
    return names


def test_why_a_rank_failed_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    """Rank 0 polls for the file: one that is there and still empty would hide the reason."""
    _, names = Pool.shared().run(fails_on_rank_one, 2, {"folder": str(tmp_path / "saved")})
    assert names == [".rank-00001.json.tmp"]
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_could_not_be_replaced_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = small()
    path = tmp_path / "saved"
    zeroshard.save(path, model, optimizer, extra=1)
    rename = os.rename

    def fails_once(source: Path, target: Path) -> None:
        if str(source).endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fails_once)
        with pytest.raises(CheckpointError, match="Input/output error"):
            zeroshard.save(path, model, optimizer, extra=2)
    for folder in tmp_path.glob(".*.partial"):
        shutil.rmtree(folder)
    assert zeroshard.load(path, model, optimizer) == 1


@pytest.mark.parametrize("failing", ["the old one aside", "the new one to its place", "back"])
def test_after_a_failed_rename_a_load_of_the_path_and_of_the_folder_take_the_same(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = small()
    path = tmp_path / "saved"
    zeroshard.save(path, model, optimizer, extra=1)
    rename = os.rename

    def fails(source: Path, target: Path) -> None:
        aside, back = source == path, str(source).endswith(".removing")
        if {"the old one aside": aside, "the new one to its place": not aside and not back, "back": not aside}[failing]:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fails)
        with pytest.raises(CheckpointError, match="Input/output error"):
            zeroshard.save(path, model, optimizer, extra=2)
        assert zeroshard.load(tmp_path, model, optimizer) == zeroshard.load(path, model, optimizer) == 2
        with pytest.raises(CheckpointError, match="Input/output error"):  # the next one must not lose it
            zeroshard.save(path, model, optimizer, extra=3)
    assert zeroshard.load(tmp_path, model, optimizer) == zeroshard.load(path, model, optimizer) >= 2
    zeroshard.save(path, model, optimizer, extra=4)
    assert zeroshard.load(tmp_path, model, optimizer) == zeroshard.load(path, model, optimizer) == 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_a_complete_save_without_its_name_outlives_the_next_save_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = small()
    path = tmp_path / "saved"
    zeroshard.save(path, model, optimizer, extra=1)

    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for seam in ("publish", "write_part"):
        with monkeypatch.context() as patch:
            patch.setattr(background, seam, fails)
            with pytest.raises(CheckpointError, match="Input/output error"):
                zeroshard.save(path, model, optimizer, extra=2)
    assert zeroshard.load(tmp_path, model, optimizer) == zeroshard.load(path, model, optimizer) == 2


def test_a_load_takes_the_old_checkpoint_while_a_new_one_is_being_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = small()
    path = tmp_path / "saved"
    zeroshard.save(path, model, optimizer, extra=1)
    gate, complete, real = threading.Event(), threading.Event(), background.publish

    def waits(*arguments: Path) -> None:
        complete.set()
        gate.wait(60)
        real(*arguments)

    monkeypatch.setattr(background, "publish", waits)
    saving = zeroshard.save(path, model, optimizer, extra=2, asynchronous=True)
    assert complete.wait(60)
    other, its_optimizer = small()
    assert zeroshard.load(path, other, its_optimizer) == zeroshard.load(tmp_path, other, its_optimizer) == 1
    gate.set()
    saving.wait()
    assert zeroshard.load(path, other, its_optimizer) == zeroshard.load(tmp_path, other, its_optimizer) == 2


def test_keep_leaves_what_another_machine_may_still_write_and_removes_what_was_silent_for_a_day(tmp_path: Path) -> None:
    def partial(name: str, claim: str, silent: float) -> Path:
        folder = tmp_path / f".{name}.0123456789abcdef.partial"
        folder.mkdir()
        for file, text in (("claim", claim), ("rank-00000.safetensors", "x")):
            (folder / file).write_text(text)
        then = time.time() - silent
        for file in (*folder.iterdir(), folder):
            os.utime(file, (then, then))
        return folder

    elsewhere = partial("a", "process 7 on another machine", 0)
    forgotten = partial("b", "process 7 on another machine", 25 * 3600)
    without_locks = partial("c", "", 25 * 3600)
    zeroshard.save(tmp_path / "saved", *small(), keep=1)
    assert elsewhere.exists()
    assert not forgotten.exists()
    assert not without_locks.exists()
