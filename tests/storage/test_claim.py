"""Of two jobs that save to one path, one goes on and the other is told; a job that died holds up nobody."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard import CheckpointError
from zeroshard.storage import background, claim

WRITES_SLOWLY = """
import sys, time, torch, zeroshard
from pathlib import Path
from zeroshard.storage import background

def slowly(folder, *arguments):
    (folder / "rank-00000.safetensors").touch()
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    real(folder, *arguments)

real, background.write_part = background.write_part, slowly
model = torch.nn.Linear(4, 4)
model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()))
zeroshard.save(sys.argv[1], model, optimizer, extra="the other job's")
"""


def small() -> tuple[Any, Any]:
    model = nn.Linear(4, 4)
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters()))


@contextmanager
def another_job(path: Path, go: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", WRITES_SLOWLY, str(path), str(go)])
    try:
        deadline = time.monotonic() + 60
        while not list(path.parent.glob(f".{path.name}.*.partial/rank-00000.safetensors")):
            assert process.poll() is None, "the other job ended"
            assert time.monotonic() < deadline, "the other job does not write"
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_job_that_saves_to_the_path_of_another_is_told_and_does_no_harm(tmp_path: Path) -> None:
    path, go = tmp_path / "saved", tmp_path / "go"
    with another_job(path, go) as other:
        with pytest.raises(
            CheckpointError, match=rf"saved is being written by another job \(process {other.pid} on .*\)"
        ):
            zeroshard.save(path, *small())
        zeroshard.save(tmp_path / "mine", *small())
        go.touch()
        assert other.wait(60) == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["go", "mine", "saved"]
    assert not (path / "claim").exists()
    assert zeroshard.load(path, *small()) == "the other job's"
    zeroshard.save(path, *small(), extra="mine")
    assert zeroshard.load(path, *small()) == "mine"


@pytest.mark.slow
def test_a_job_that_was_killed_holds_up_nobody(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    with another_job(path, tmp_path / "go") as other:
        other.kill()
        other.wait()
        zeroshard.save(path, *small(), extra="mine")
    assert zeroshard.load(path, *small()) == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


LOCKS = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(60)
"""


@contextmanager
def locked_by_another(file: Path) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", LOCKS, str(file)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"locked\n"
            yield
        finally:
            process.kill()


def test_a_file_system_without_locks_is_saved_to_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def has_none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(claim.fcntl, "lockf", has_none)
    for number in range(2):
        zeroshard.save(tmp_path / "saved", *small(), extra=number)
    assert zeroshard.load(tmp_path / "saved", *small()) == 1


def test_a_lock_counts_however_long_nothing_is_written(tmp_path: Path) -> None:
    other = tmp_path / ".saved.0123456789abcdef.partial"
    other.mkdir()
    with locked_by_another(other / "claim"):
        with pytest.raises(CheckpointError, match="is being written by another job"):
            zeroshard.save(tmp_path / "saved", *small())
        assert [entry.name for entry in tmp_path.iterdir()] == [other.name]
    zeroshard.save(tmp_path / "saved", *small())
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_a_claim_that_may_not_be_opened_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "claim").touch()
    assert not claim.is_claimed(tmp_path)

    def forbidden(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(claim.os, "open", forbidden)
    assert claim.is_claimed(tmp_path)


def test_a_claim_that_cannot_be_written_leaves_no_folder_and_no_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    model = small()
    with monkeypatch.context() as patch:
        patch.setattr(claim.os, "pwrite", full)
        with pytest.raises(CheckpointError, match="No space left on device; make room there"):
            zeroshard.save(tmp_path / "saved", *model)
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == before
    zeroshard.save(tmp_path / "saved", *model)


# -- jobs -------------------------------------------------------------------------------------------------------------

CLAIMS = """
import sys, time
from pathlib import Path
from zeroshard.storage.claim import claimed

with claimed(Path(sys.argv[1])):
    print("claimed", flush=True)
    time.sleep(60)
"""


@contextmanager
def claimed_by_another(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", CLAIMS, str(folder)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"claimed\n"
            yield process
        finally:
            process.kill()


def test_a_folder_of_another_job_is_refused_by_name_until_that_job_has_died(tmp_path: Path) -> None:
    said = (
        rf"run is being written by another job \(process {{}} on {re.escape(socket.gethostname())}, since 20[\d: -]+\)"
    )
    with claimed_by_another(tmp_path / "run") as other:
        with (
            pytest.raises(CheckpointError, match=f"{said.format(other.pid)}; give every job a folder of its own, or"),
            claim.claimed(tmp_path / "run"),
        ):
            pass
        assert claim.is_claimed(tmp_path / "run")
        other.kill()
        other.wait()
        with claim.claimed(tmp_path / "run"):
            assert f"process {os.getpid()} on " in (tmp_path / "run" / "claim").read_text()
    assert not claim.is_claimed(tmp_path / "run")


def test_a_claim_that_ends_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for name in ("new", "old"):
        with claim.claimed(tmp_path / name):
            assert [entry.name for entry in (tmp_path / name).iterdir()] == ["claim"]
    assert not (tmp_path / "new").exists()
    assert not list((tmp_path / "old").iterdir())


def test_a_second_claim_of_the_same_process_is_refused_and_the_first_stays_locked(tmp_path: Path) -> None:
    looks = "import sys; from pathlib import Path; from zeroshard.storage.claim import is_claimed\n"
    looks += "sys.exit(not is_claimed(Path(sys.argv[1])))"
    with claim.claimed(tmp_path / "run"):
        with pytest.raises(CheckpointError, match="this one"), claim.claimed(tmp_path / "run"):
            pass
        assert subprocess.run([sys.executable, "-c", looks, str(tmp_path / "run")], check=False).returncode == 0


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_something_else_that_is_called_a_claim_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    target, file = tmp_path / "target", tmp_path / "run" / "claim"
    file.parent.mkdir()
    target.write_text("my notes")
    if kind == "file":
        file.write_text("my notes")
    elif kind == "link":
        file.symlink_to(target)
    else:
        file.mkdir()
    with pytest.raises((CheckpointError, OSError)), claim.claimed(tmp_path / "run"):
        pass
    assert target.read_text() == "my notes"
    assert file.is_dir() or file.read_text() == "my notes"


# -- what saves to other paths have left ------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_killed_job_left_at_another_path_goes_and_what_one_writes_stays(tmp_path: Path) -> None:
    go = tmp_path / "elsewhere"
    with another_job(tmp_path / "step-1", go) as killed, another_job(tmp_path / "step-2", go) as alive:
        killed.kill()
        killed.wait()
        zeroshard.save(tmp_path / "step-3", *small())
        assert len(list(tmp_path.glob(".step-1.*.partial"))) == 1
        zeroshard.save(tmp_path / "step-4", *small(), keep=5)
        assert not list(tmp_path.glob(".step-1.*.partial"))
        assert len(list(tmp_path.glob(".step-2.*.partial"))) == 1
        go.touch()
        assert alive.wait(60) == 0
    assert zeroshard.load(tmp_path / "step-2", *small()) == "the other job's"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["elsewhere", "step-2", "step-3", "step-4"]


@pytest.mark.slow
def test_what_this_process_writes_at_another_path_stays_and_stays_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write_part = threading.Event(), background.write_part

    def waits(partial: Path, *arguments: Any) -> None:
        if partial.name.startswith(".step-1."):
            gate.wait(60)
        write_part(partial, *arguments)

    monkeypatch.setattr(background, "write_part", waits)
    first = zeroshard.save(tmp_path / "step-1", *small(), extra=1, asynchronous=True)
    zeroshard.save(tmp_path / "step-2", *small(), keep=5)
    (partial,) = tmp_path.glob(".step-1.*.partial")
    looks = "import sys; from pathlib import Path; from zeroshard.storage.claim import is_claimed\n"
    looks += "sys.exit(not is_claimed(Path(sys.argv[1])))"
    assert subprocess.run([sys.executable, "-c", looks, str(partial)], check=False).returncode == 0
    gate.set()
    first.wait()
    assert zeroshard.load(tmp_path / "step-1", *small()) == 1


@pytest.mark.parametrize(
    "said",
    [None, "", "process 1 on another", f"process 1 on {socket.gethostname()}"],
    ids=["no claim", "no name", "another machine", "this machine"],
)
def test_at_another_path_only_what_a_process_that_has_ended_wrote_goes(said: str | None, tmp_path: Path) -> None:
    left = tmp_path / ".step-1.0123456789abcdef.partial"
    left.mkdir()
    (left / "rank-00000.safetensors").touch()
    if said is not None:
        (left / "claim").write_text(said)
        with locked_by_another(left / "claim"):
            zeroshard.save(tmp_path / "step-2", *small(), keep=1)
            assert left.exists()
    zeroshard.save(tmp_path / "step-2", *small(), keep=1)
    # A process writes its name when it has the lock. The locks of another machine may not be seen here.
    assert left.exists() == (not (said or "").endswith(socket.gethostname()))


def test_where_there_are_no_locks_what_is_written_at_another_path_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_none(*_: object) -> None:
        raise OSError(37, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(claim.fcntl, "lockf", has_none)
        other = tmp_path / ".step-1.0123456789abcdef.partial"
        claim.FolderClaim(other)
    claim._own.clear()  # as if another process's
    zeroshard.save(tmp_path / "step-2", *small(), keep=1)
    assert (other / "claim").exists()
