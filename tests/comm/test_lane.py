"""After a collective has failed, later ones on the same lane raise. They never use data that did not arrive."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from zeroshard import StallError
from zeroshard.comm.lane import _OnHost
from zeroshard.comm.posts import Posts
from zeroshard.comm.store import BoundedStore
from zeroshard.comm.watchdog import Watchdog


def watchdog_of_one() -> Watchdog:
    watchdog = Watchdog(Posts(BoundedStore(dist.HashStore()), 0, 2, "test"), 0, 2, 1.0)
    watchdog.stopped.set()  # else the explanation of a stall would wait for posts of other ranks
    return watchdog


@pytest.mark.parametrize("error", [RuntimeError("gloo: timed out"), KeyboardInterrupt(), MemoryError("no room")])
def test_a_wait_that_failed_fails_again(error: BaseException) -> None:
    watchdog = watchdog_of_one()
    calls = []

    def finish() -> None:
        calls.append(1)
        raise error

    pending = _OnHost(watchdog, finish, "a gather")
    with pytest.raises(StallError if isinstance(error, RuntimeError) else type(error)):
        pending.wait()
    for _ in range(2):
        with pytest.raises(StallError, match="no collective is possible since an earlier one failed"):
            pending.wait()
    assert len(calls) == 1
    with pytest.raises(StallError, match="earlier one failed"), watchdog.blaming("a gather"):
        pytest.fail("a collective began on a broken lane")


def test_a_wait_that_succeeded_is_over() -> None:
    calls: list[int] = []
    pending = _OnHost(watchdog_of_one(), lambda: calls.append(1), "a gather")
    pending.wait()
    pending.wait()
    assert calls == [1]
