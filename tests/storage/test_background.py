"""Asynchronous saves: what is saved is what was there, training goes on, and nothing goes wrong unheard."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard
from tests.ranks import Pool
from tests.storage.runs import SETUPS, Run, difference
from zeroshard import CheckpointError
from zeroshard.storage import background
from zeroshard.system import machine


class Gate:
    """Stands before the disk: writing waits until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self._open, self._error, self._write = threading.Event(), error, background.write_part
        patch.setattr(background, "write_part", self)

    def __call__(self, *arguments: Any) -> None:
        self._open.wait(60)
        if self._error is not None:
            raise self._error
        self._write(*arguments)

    def open(self) -> None:
        self._open.set()


def goes_on(folder: str, setups: list[str]) -> None:
    for setup in setups:
        with pytest.MonkeyPatch.context() as patch:
            gate = Gate(patch)
            run, same = Run(SETUPS[setup]), Run(SETUPS[setup])
            for one in (run, same):
                torch.manual_seed(0)
                random.seed(0)
                one.train(2)
            saving = run.save(f"{folder}/{setup}", asynchronous=True)
            assert not saving.done
            run.train(2)  # while nothing is written
            assert not os.path.exists(f"{folder}/{setup}")
            gate.open()
            saving.wait()
            assert saving.done
        other = Run(SETUPS[setup], seed=2)
        other.load(f"{folder}/{setup}")
        assert difference(other.everything(), same.everything()) is None, setup


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_reach_it(tmp_path: Path) -> None:
    setups = ["stage 0 bf16", "stage 2", "stage 3 bf16", "split", "read back", "delayed"]
    Pool.shared().run(goes_on, 2, {"folder": str(tmp_path), "setups": setups})


def test_a_save_waits_for_the_one_before_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = Gate(monkeypatch)
    run = Run({"stage": 2})
    first = run.save(str(tmp_path / "first"), asynchronous=True)
    threading.Timer(0.3, gate.open).start()
    second = run.save(str(tmp_path / "second"), asynchronous=True)
    assert first.done
    assert "first is still being written, and is waited for" in capsys.readouterr().out
    second.wait()
    for name in ("first", "second"):
        assert (tmp_path / name / "COMPLETE").exists()


def test_what_goes_wrong_behind_training_is_raised_by_the_next_save_or_by_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run({"stage": 2})
    with monkeypatch.context() as patch:
        gate = Gate(patch, OSError(28, "No space left on device"))
        gate.open()
        saving = run.save(str(tmp_path / "first"), asynchronous=True)
        run.train(1)
        with pytest.raises(CheckpointError, match=r"first was not saved: rank 0: OSError: .*No space left"):
            run.save(str(tmp_path / "second"), asynchronous=True)
        saving.wait()  # told once
        with pytest.raises(CheckpointError, match="No space left"):
            run.save(str(tmp_path / "second"), asynchronous=True).wait()
        with pytest.raises(CheckpointError, match="No space left"):
            run.save(str(tmp_path / "third"))
    run.save(str(tmp_path / "third"))
    assert sorted(entry.name for entry in tmp_path.iterdir() if not entry.name.startswith(".")) == ["third"]


def test_where_memory_has_no_room_a_save_blocks_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run({"stage": 2})
    monkeypatch.setattr(machine, "available_memory", lambda: 0)
    saving = run.save(str(tmp_path / "saved"), asynchronous=True)
    assert saving.done
    assert re.search(r"\d [KMG]B too much, so this save blocks", capsys.readouterr().out)
    Run({"stage": 1}, seed=2).load(str(tmp_path / "saved"))


PROGRAM = """
import sys, torch, zeroshard
model = torch.nn.Linear(300, 300)
model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()))
zeroshard.save(sys.argv[1], model, optimizer, extra=7, asynchronous=True)
"""


@pytest.mark.slow
def test_a_process_that_ends_finishes_its_save_or_says_why_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM]
    subprocess.run([*command, str(tmp_path / "saved")], check=True, timeout=60)
    model = torch.nn.Linear(300, 300)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()))
    assert zeroshard.load(tmp_path / "saved", model, optimizer) == 7
    broken = PROGRAM.replace(
        "zeroshard.save", "from zeroshard.storage import background as b\nb.write_part = 1\nzeroshard.save"
    )
    done = subprocess.run(
        [sys.executable, "-c", broken, str(tmp_path / "other")], capture_output=True, text=True, check=False, timeout=60
    )
    assert "other was not saved: TypeError" in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_gradients_that_wait_for_their_step_are_not_lost_silently(tmp_path: Path) -> None:
    for options in ({"stage": 2}, SETUPS["offload"]):
        run = Run(options)
        run.save(str(tmp_path / "saved"))
        run.model(torch.randn(6, 7), 0).float().square().mean().backward()
        for call in (run.save, run.load):
            with pytest.raises(
                RuntimeError, match=r"between backward\(\) and step\(\): the gradients of .* would be lost"
            ):
                call(str(tmp_path / "saved"))
        run.optimizer.zero_grad()
        run.save(str(tmp_path / "saved"))
        run.train(1)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    run = Run({"stage": 2})
    path = str(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"extra.a\[1\] is a builtin_function"):
        run.save(path, extra={"a": [1, print]})
    with pytest.raises(ValueError, match=r"loader: a list has no state_dict\(\)"):
        zeroshard.save(path, run.model, run.optimizer, loader=[1])
    with pytest.raises(ValueError, match="this optimizer is not the model's"):
        zeroshard.save(path, run.model, Run({"stage": 1}).optimizer)
    zeroshard.save(path, run.model, run.optimizer)
    with pytest.raises(CheckpointError, match="has no scheduler, so leave scheduler= out; nothing was loaded"):
        run.load(path)
    zeroshard.save(path, run.model)
    with pytest.raises(CheckpointError, match="has no optimizer"):
        zeroshard.load(path, run.model, run.optimizer)
    zeroshard.load(path, run.model)


EXTRA: list[Any] = [
    None,
    {"a": [1, 2.5, "x", None, True], "b": (1, (2, 3)), "c": {1: 2, (1, 2): 3}, "$": 1},
    [float("inf"), -0.0, 1e-300, 2**70, b"bytes", torch.bfloat16],
    {"small": torch.tensor([1.5, float("-inf")]), "large": torch.randn(50, 20).bfloat16(), "none": torch.empty(0, 3)},
    torch.tensor(True),
]


@pytest.mark.parametrize("number", range(len(EXTRA)))
def test_extra_comes_back_as_it_was(number: int, tmp_path: Path) -> None:
    run = Run({"stage": 2})
    run.save(str(tmp_path / "saved"), extra=EXTRA[number])
    assert difference(run.load(str(tmp_path / "saved")), EXTRA[number]) is None
