"""Runs that are killed, stopped and resumed, as `zeroshard train` has them."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint.killing import Torchrun, kill_often, weights_of

KILLS = 5


def test_whatever_rank_is_killed_and_when_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    Torchrun(tmp_path / "whole", 0).end()
    told = kill_often(tmp_path / "killed", KILLS, 1)
    begun = [line for line in told.splitlines() if line.startswith(("resumed after step", "no checkpoint"))]
    assert len(begun) == KILLS + 1, told
    assert any(line.startswith("resumed") for line in begun), told
    assert weights_of(tmp_path / "killed") == weights_of(tmp_path / "whole")
