"""The check of the plan runs, and would see a plan that is off."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.plan_cases import Case, Measured, cases
from benchmarks.plan_check import main
from benchmarks.plan_compare import Compared, compare, recommendations, verdicts
from zeroshard.plan.machine.profile import load


def compared(case: Case, seconds: float) -> Compared:
    """A case whose run was as planned, but for its time."""
    one = compare(case, Measured(), torch.device("cuda"), load("h200"))
    return replace(one, measured=replace(one.planned, seconds=seconds))


@pytest.mark.slow
def test_a_few_cases_are_as_planned_here(tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--only", "fp32", "--out", str(tmp_path / "out.json")]) == 0
    told = json.loads((tmp_path / "out.json").read_text())
    assert len(told["cases"]) == 4
    assert {case["world"] for case in told["cases"]} == {1, 8}
    assert all(case["measured"]["volume"] > 0 for case in told["cases"] if case["world"] > 1)
    again = ["--device", "cpu", "--only", "fp32", "--measure", "nothing", "--out", str(tmp_path / "again.json")]
    assert main([*again, "--add", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "again.json").read_text())["cases"] == told["cases"]


def test_there_are_enough_cases_of_every_kind() -> None:
    found = cases(on_gpu=True)
    assert len(found) >= 20
    assert {case.stage for case in found} == {0, 1, 2, 3}
    assert {case.precision for case in found} == {"fp32", "bf16", "fp16"}
    assert sum(case.way != "none" for case in found) >= 10


def test_what_is_recommended_is_judged_by_what_was_measured() -> None:
    members = [case for case in cases(on_gpu=True) if case.precision == "bf16"]
    by_plan = [compared(case, 1.0) for case in members]
    by_plan = [Compared(one.case, one.row, replace(one.measured, seconds=one.row.time.total)) for one in by_plan]  # type: ignore[union-attr]
    advised = recommendations(by_plan)
    assert len(advised) >= 10
    assert all(answer.good for answer in advised)
    otherwise = [
        Compared(one.case, one.row, replace(one.measured, seconds=1 / one.measured.seconds))  # type: ignore[operator]
        for one in by_plan
    ]
    held, _ = verdicts(otherwise, recommendations(otherwise))["recommended"]
    assert not held


def test_a_plan_that_is_off_fails() -> None:
    one = compared(cases(on_gpu=True)[0], 1.0)
    for name, factor in (("states", 1.02), ("peak", 1.2), ("volume", 2)):
        wrong = replace(one.measured, **{name: math.ceil(factor * getattr(one.measured, name)) + 1})
        assert not verdicts([Compared(one.case, one.row, wrong)], [])[name][0]


def test_a_time_holds_within_a_fifth_of_the_plan_or_within_the_range_that_the_plan_gives() -> None:
    small, large = (
        next(case for case in cases(on_gpu=True) if case.name.startswith(job) and case.way == "none")
        for job in ("355M, batch 4", "355M, batch 32")
    )
    for case, factor, holds in ((large, 1.19, True), (large, 1.3, False), (small, 1.3, True), (small, 3.0, False)):
        planned = compared(case, 1.0)
        assert planned.row.time is not None
        one = compared(case, factor * planned.row.time.total)
        assert verdicts([one], [])["seconds"][0] == holds, (case.name, factor)
