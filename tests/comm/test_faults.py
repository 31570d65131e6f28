"""A rank that breaks ends all ranks in time, with an error that names it: on the CPU, over Gloo."""

from __future__ import annotations

import pytest

from tests.comm.faults import Case, assert_ended_well, run
from tests.matrix import quick

CASES = {
    str(case): case
    for case in (
        Case("stop", "forward", rank=0),
        Case("stop", "forward", rank=0, launcher=True),
        Case("stop", "backward", stage=2),
        Case("stop", "step", stage=1),
        Case("stop", "save", rank=0, stage=2),
        Case("stop", "step", rank=0, stage=2, offload=True),
        Case("stop", "forward", rank=2, world=4),
        Case("kill", "forward"),
        Case("kill", "backward", rank=0, stage=2),
        Case("kill", "step", rank=0),
        Case("kill", "save"),
        Case("raise", "forward", stage=2),
        Case("raise", "backward"),
        Case("raise", "step", rank=0, stage=0),
        Case("raise", "save", stage=2),
        Case("disagree", "forward"),
        Case("hang", "forward", rank=1, stage=0),
        Case("hang", "step", rank=0, world=3, stage=0),
        Case("hang", "backward", rank=1, world=3, stage=0),
    )
}


@pytest.mark.parametrize("name", quick(CASES, "stop-forward-rank0of2-stage3"))
def test_a_rank_that_breaks_ends_all_ranks_in_time_and_is_named(name: str) -> None:
    assert_ended_well(CASES[name], run(CASES[name]))
