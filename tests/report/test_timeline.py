"""What a step waited for, and where its time went."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.runs import OFFLOADED_STEP
from zeroshard.report.journal import Span, Traced
from zeroshard.report.timeline import COMPUTE, GATHER, LANES, OTHER, REDUCE, UP, UPDATE, Wait, typical, windows


def traced(spans: list[list[object]], marks: tuple[float, ...] = (0.0, 1.0)) -> Traced:
    made = [Span(str(lane), str(name), float(start), float(stop)) for lane, name, start, stop in spans]  # type: ignore[arg-type]
    return Traced(list(range(5, 4 + len(marks))), list(marks), made, 0)


def test_a_wait_is_named_after_the_work_that_ended_just_before_computing_went_on() -> None:
    (window,) = windows(
        traced(
            [
                [GATHER, "a", 0.0, 0.2],
                [COMPUTE, "forward a", 0.2, 0.6],
                [REDUCE, "a", 0.4, 0.9],
                [COMPUTE, "update", 0.9, 1],
            ]
        )
    )
    assert window.waits == [Wait(0.0, 0.2, GATHER), Wait(0.6, 0.9, REDUCE)]
    assert window.shares == pytest.approx({"forward": 0.4, "update": 0.1, "wait: gather": 0.2, "wait: reduce": 0.3})


def test_work_that_is_hidden_behind_computing_is_no_wait() -> None:
    (window,) = windows(traced([[COMPUTE, "forward a", 0.0, 1.0], [GATHER, "b", 0.1, 0.9], [UPDATE, "a", 0.0, 0.5]]))
    assert window.waits == []
    assert (window.busy(GATHER), window.busy(UPDATE)) == (pytest.approx(0.8), 0.5)


def test_a_chain_of_work_is_followed_back() -> None:
    (window,) = windows(traced([[UPDATE, "a", 0.1, 0.4], [UP, "a", 0.4, 0.5], [COMPUTE, "forward a", 0.5, 1.0]]))
    assert window.waits == [Wait(0.0, 0.1, OTHER), Wait(0.1, 0.4, UPDATE), Wait(0.4, 0.5, UP)]


def test_the_update_of_the_example_is_waited_for_until_its_first_unit_is_there() -> None:
    (window,) = windows(traced(list(OFFLOADED_STEP), (0.0, 0.6)))
    assert window.busy(UPDATE) == 0.25
    assert sum(wait.stop - wait.start for wait in window.waits) == pytest.approx(0.21)


def test_while_the_host_updates_without_a_break_what_follows_each_update_is_no_cause_of_its_own() -> None:
    spans: list[list[object]] = []
    for unit in range(4):  # each update takes 0.2, and its parameters come 0.05 later; computing takes 0.1
        spans.append([UPDATE, f"{unit}", 0.2 * unit, 0.2 * (unit + 1)])
        spans.append([UP, f"{unit}", 0.2 * (unit + 1), 0.2 * (unit + 1) + 0.05])
        spans.append([COMPUTE, f"forward {unit}", 0.2 * (unit + 1) + 0.05, 0.2 * (unit + 1) + 0.15])
    (window,) = windows(traced(spans))
    assert [wait.cause for wait in window.waits] == [UPDATE, UPDATE, UPDATE, UPDATE, UP, OTHER]
    assert window.shares == pytest.approx(
        {"forward": 0.4, "wait: host update": 0.5, "wait: to the device": 0.05, "wait: other": 0.05}
    )


def test_waits_after_the_last_wait_for_the_host_keep_their_causes() -> None:
    spans = [
        [UPDATE, "a", 0.0, 0.2],
        [COMPUTE, "forward a", 0.2, 0.5],
        [GATHER, "b", 0.5, 0.6],
        [UPDATE, "b", 0.3, 0.9],
    ]
    (window,) = windows(traced([*spans, [COMPUTE, "forward b", 0.6, 1.0]]))
    assert window.waits == [Wait(0.0, 0.2, UPDATE), Wait(0.5, 0.6, GATHER)]


def test_time_in_which_no_lane_worked_is_told_as_such() -> None:
    (window,) = windows(traced([[COMPUTE, "forward a", 0.3, 1.0]]))
    assert window.waits == [Wait(0.0, 0.3, OTHER)]


def test_the_first_of_several_steps_does_not_stand_for_all() -> None:
    found = typical(traced([], (0.0, 0.1, 1.1, 3.1)))
    assert found is not None
    assert (found.step, found.seconds) == (6, pytest.approx(1.0))
    assert typical(None) is None


times = st.floats(0, 1, allow_nan=False)
spans = st.lists(
    st.tuples(st.sampled_from(LANES), st.sampled_from(["forward a", "backward", "x"]), times, times), max_size=30
)


@given(spans)
def test_the_parts_of_a_step_add_up_to_it(given_spans: list[tuple[str, str, float, float]]) -> None:
    ordered = [[lane, name, min(start, stop), max(start, stop)] for lane, name, start, stop in given_spans]
    (window,) = windows(traced(ordered))  # type: ignore[arg-type]
    assert sum(window.shares.values()) == pytest.approx(1.0)
    reached = 0.0
    for wait in window.waits:
        assert reached <= wait.start < wait.stop <= 1.0
        reached = wait.stop
