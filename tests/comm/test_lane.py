"""A lane after a collective that failed: what is tried again raises, and never takes data that did not come."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from zeroshard import StallError
from zeroshard.comm.lane import Lane, _Messages
from zeroshard.comm.traffic import Meter


class Alone:
    """One rank that knows of no others."""

    device, backend, patience = torch.device("cpu"), "gloo", timedelta(seconds=1)

    def progress(self, where: str) -> None:
        pass

    def explain_stall(self, where: str) -> str:
        return f"rank 1 did not join {where}"


@pytest.mark.parametrize("error", [RuntimeError("gloo: timed out"), KeyboardInterrupt(), MemoryError("no room")])
def test_a_wait_that_failed_fails_again(error: BaseException) -> None:
    lane = Lane("gathers", Alone(), None, Meter())
    calls = []

    def finish() -> None:
        calls.append(1)
        raise error

    messages = _Messages(lane, finish)
    with pytest.raises(StallError if isinstance(error, RuntimeError) else type(error)):
        messages.wait()
    for _ in range(2):
        with pytest.raises(StallError, match="no collective is possible since an earlier one failed"):
            messages.wait()
    assert len(calls) == 1
    with pytest.raises(StallError, match="earlier one failed"), lane.blaming_stalls():
        pytest.fail("a collective began on a broken lane")


def test_a_wait_that_succeeded_is_over() -> None:
    calls: list[int] = []
    messages = _Messages(Lane("gathers", Alone(), None, Meter()), lambda: calls.append(1))
    messages.wait()
    messages.wait()
    assert calls == [1]
