"""DESIGN, invariant 1: the host's step gives the bits of a step that waits for it, in every stage and any loop."""

from __future__ import annotations

import pytest

from tests.matrix import quick
from tests.offload.scenarios import (
    SCENARIOS,
    assert_close_result,
    assert_same_result,
    slow_host,
)
from tests.ranks import on_ranks
from zeroshard import Offload

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", SCENARIOS)
def test_an_asynchronous_step_gives_the_bits_of_a_blocking_one_and_the_devices_within_rounding(name: str) -> None:
    scenario = SCENARIOS[name]
    expected = scenario.run(2, Offload(blocking=True))
    with slow_host():
        for stage in (0, 3):
            assert_same_result(scenario.run(stage, Offload()), expected, f"stage {stage}")
    assert_close_result(expected, scenario.run(2), "without offload")
    if "fp16" in name:
        assert expected.skipped_steps >= 2


ON_ONE_RANK_ALONE = {
    "adam",
    "groups",
    "momentum",
    "clipping",
    "closures",
    "a schedule",
    "micro-batches",
    "clipping in bf16",
    "sgd without moments",
    "a moving average",
    "clipping by hand in bf16",
    "fp16 with skipped steps",
    "looks at everything",
    "dropped gradients in bf16 with clipping",
}
"""Other scenarios have all that ranks exchange in them."""


QUICK = (
    "plain",
    "micro-batches and clipping in bf16",
    "fp16 with skipped steps, micro-batches and clipping",
    "parameters that some ranks use",
    "a changing order",
    "delayed reduction",
    "a failed backward",
)


@pytest.mark.parametrize("name", quick([name for name in SCENARIOS if name not in ON_ONE_RANK_ALONE], *QUICK))
@on_ranks(2)
def test_all_stages_give_the_same_bits_on_two_ranks_however_late_the_host_is(name: str) -> None:
    scenario = SCENARIOS[name]
    expected = scenario.run(1, Offload(blocking=True))
    with slow_host():
        for stage in scenario.stages:
            assert_same_result(scenario.run(stage, Offload()), expected, f"stage {stage}")
    if "some ranks" in name or "reduc" in name:
        assert_close_result(expected, scenario.run(2), "without offload")


def test_the_host_really_is_late_in_these_tests() -> None:
    """Otherwise they would compare nothing: after a step, parameters are not there yet."""
    from tests.models import loss_of
    from zeroshard.runtime import runtime_of

    model, optimizer = SCENARIOS["plain"].begin(2, Offload())
    with slow_host(0.05):
        loss_of(model, 0).backward()
        optimizer.step()
        assert any(flat.updating for flat in runtime_of(model).flats)
    loss_of(model, 1)
    assert not any(flat.updating for flat in runtime_of(model).flats)
