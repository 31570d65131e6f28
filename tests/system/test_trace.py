"""Traces of the user's and of the recorder's do not get into each other's way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zeroshard.system import trace


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    yield
    left = trace.begin()
    assert left is not None, "a trace goes on"
    trace.end(left)


def test_a_trace_of_the_users_takes_the_place_of_one_that_yields() -> None:
    quiet = trace.begin()
    assert quiet is not None
    trace.phase("forward")
    with trace.trace() as mine:
        trace.phase("backward")
        trace.phase(None)
    assert [span.name for span in mine.spans] == ["backward"]
    assert not trace.end(quiet)


def test_one_that_yields_does_not_begin_inside_another() -> None:
    with trace.trace():
        assert trace.begin() is None
        with pytest.raises(RuntimeError, match="is recording already"), trace.trace():
            pass


def test_marks_have_no_length_and_are_in_order() -> None:
    quiet = trace.begin()
    assert quiet is not None
    quiet.mark("step")
    trace.phase("forward", "blocks.0")
    trace.phase(None)
    quiet.mark("step")
    assert trace.end(quiet)
    assert [(span.track, span.name) for span in quiet.spans] == [
        (trace.MARK, "step"),
        (trace.COMPUTE, "forward blocks.0"),
        (trace.MARK, "step"),
    ]
    assert all(span.start == span.stop for span in quiet.spans if span.track == trace.MARK)


def test_without_a_trace_a_collective_costs_nothing() -> None:
    assert trace.collective(trace.GATHER, "blocks.0") is None
