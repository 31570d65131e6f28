"""DESIGN, invariant 1: the host's step gives the bits of a step that waits for it, in every stage and any loop."""

from __future__ import annotations

import pytest
import torch

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
def test_the_asynchronous_step_gives_the_bits_of_the_blocking_one_in_every_stage(name: str) -> None:
    scenario = SCENARIOS[name]
    expected = scenario.run(2, Offload(blocking=True))
    with slow_host():
        for stage in scenario.stages:
            assert_same_result(scenario.run(stage, Offload()), expected, f"stage {stage}")
    if not any(value.dtype is torch.bfloat16 for value in expected.weights.values()):
        assert_close_result(expected, scenario.run(2), "without offload")
    if "fp16" in name:
        assert expected.skipped_steps >= 2
