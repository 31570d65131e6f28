"""DESIGN, invariant 1: the host's step gives the bits of a step that waits for it, in every stage and any loop."""

from __future__ import annotations

import pytest

from tests.offload.scenarios import (
    SCENARIOS,
    assert_close_result,
    assert_same_result,
    slow_host,
)
from tests.ranks import on_ranks
from zeroshard import Offload


@pytest.mark.parametrize("name", SCENARIOS)
@on_ranks(2)
def test_an_asynchronous_step_gives_the_bits_of_a_blocking_one_and_the_devices_within_rounding(
    name: str,
) -> None:
    scenario = SCENARIOS[name]
    expected = scenario.run(2, Offload(blocking=True))
    with slow_host():
        for stage in scenario.stages:
            assert_same_result(scenario.run(stage, Offload()), expected, f"stage {stage}")
    assert_close_result(expected, scenario.run(2), "without offload")
    if "fp16" in name:
        assert expected.skipped_steps >= 2
