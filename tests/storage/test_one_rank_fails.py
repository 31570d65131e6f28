"""What goes wrong on one rank alone, of whatever type, is known to all of them, and they go on together."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Pool
from tests.storage.runs import Run
from zeroshard.optim.piece_states import PieceStates
from zeroshard.storage import background
from zeroshard.storage import save as saving


def fails(*_: object, **__: object) -> Any:
    raise torch.OutOfMemoryError("none left")


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def on_rank_one(target: object, name: str, call: Callable[[], object]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(target, name, fails)
        return outcome(call)


def all_cases(folder: str) -> dict[str, str]:
    run = Run({"stage": 2})
    found = {
        "allocate": on_rank_one(background, "HostBlock", lambda: run.save(f"{folder}/a", asynchronous=True)),
        "thread": on_rank_one(saving, "Saving", lambda: run.save(f"{folder}/b")),
        "path": outcome(lambda: run.save(f"{folder}/x\0y")),
        "blocking": outcome(lambda: run.save(f"{folder}/b")),
        "fill": on_rank_one(PieceStates, "forget", lambda: run.load(f"{folder}/b")),
        "scheduler": on_rank_one(type(run.scheduler), "load_state_dict", lambda: run.load(f"{folder}/b")),
        "load": outcome(lambda: run.load(f"{folder}/b")),
    }
    Run({"stage": 1}, seed=2).load(f"{folder}/a")
    return found


def test_whatever_fails_on_one_rank_is_raised_on_all_or_mended_on_all(tmp_path: Any) -> None:
    ranks = Pool.shared().run(all_cases, 2, {"folder": str(tmp_path)})
    assert [found["allocate"] for found in ranks] == ["done", "done"]
    for case in ("thread", "fill", "scheduler"):
        for found in ranks:
            assert "none left" in found[case], (case, found)
    assert all("null" in found["path"] for found in ranks), ranks
    assert [(found["blocking"], found["load"]) for found in ranks] == [("done", "done")] * 2


def disk_is_full(folder: str, rank: int) -> str:
    def writes_half(partial: Path, token: str, own: int, *_: object) -> None:
        (partial / f"rank-{own:05}.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = Run({"stage": 2})
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setattr(background, "write_part", writes_half)
        return outcome(lambda: run.save(f"{folder}/step-1"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_failed_leaves_no_folder(rank: int, tmp_path: Path) -> None:
    for found in Pool.shared().run(disk_is_full, 2, {"folder": str(tmp_path), "rank": rank}):
        assert "No space left" in found
    assert not list(tmp_path.iterdir())


def rank_zero_gives_up(folder: str) -> tuple[str, int]:
    run = Run({"stage": 2})
    told: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background.Saving, "_fail", lambda *arguments: told.append(arguments))
        if dist.get_rank() == 0:
            patch.setattr(background.Snapshots, "take", fails)
        return outcome(lambda: run.save(f"{folder}/step-1", asynchronous=True)), len(told)


def test_a_rank_that_is_told_to_give_up_writes_nothing_into_a_folder_that_is_being_removed(tmp_path: Path) -> None:
    for found, told in Pool.shared().run(rank_zero_gives_up, 2, {"folder": str(tmp_path)}):
        assert "none left" in found
        assert told == 0
    assert not list(tmp_path.iterdir())
