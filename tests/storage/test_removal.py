"""A removal that is interrupted is finished by the next save, and nobody loads what it has left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.storage import folder as folders


def small() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("files", [0, 1, 2])
def test_a_removal_that_a_crash_interrupts_is_finished_by_the_next_save(
    files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so many of its files are gone."""
    model, optimizer = small()
    zeroshard.save(tmp_path / "step-1", model, optimizer, extra=1)

    def killed(folder: Path) -> None:
        for name in ["COMPLETE", "index.json"][:files]:
            (folder / name).unlink()

    with monkeypatch.context() as patch:
        patch.setattr(folders, "_empty", killed)
        zeroshard.save(tmp_path / "step-2", model, optimizer, extra=2, keep=1)
    (left,) = (entry for entry in tmp_path.iterdir() if entry.name != "step-2")
    assert list(left.glob("rank-*"))
    assert zeroshard.load(tmp_path, model, optimizer) == 2
    zeroshard.save(tmp_path / "step-3", model, optimizer, extra=3)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-2", "step-3"]


def test_a_removed_checkpoint_is_not_loaded_though_all_its_files_are_there_and_no_other_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = small()
    zeroshard.save(tmp_path / "step-1", model, optimizer)
    monkeypatch.setattr(folders, "_empty", lambda folder: None)
    folders.remove(tmp_path / "step-1")
    with pytest.raises(zeroshard.CheckpointError, match="holds no complete checkpoint"):
        zeroshard.load(tmp_path, model, optimizer)
