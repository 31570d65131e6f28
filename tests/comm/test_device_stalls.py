"""A collective that another rank does not join is aborted: the host may wait for the device, and so for ever."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeroshard import StallError
from zeroshard.comm import posts
from zeroshard.comm.lane import Lane, _OnStream
from zeroshard.comm.lookout import Lookout
from zeroshard.comm.posts import Post, Posts
from zeroshard.comm.store import BoundedStore
from zeroshard.comm.transport import Copies
from zeroshard.comm.watchdog import Watchdog

TIMEOUT = 0.5


class Collectives:
    """A lane whose first collective is given by a function."""

    def __init__(self, first: Callable[[], object | None], *, done: bool = True) -> None:
        self.first, self.done, self.aborted = first, done, False

    def waiting(self) -> object | None:
        return self.first()

    def idle(self) -> bool:
        return self.done and self.first() is None

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def watchdog(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watchdog]:
    """One of two ranks, whose thread looks often. The other rank has never posted."""
    monkeypatch.setattr(posts, "BEAT_SECONDS", 0.02)
    made = Watchdog(Posts(BoundedStore(dist.HashStore()), 0, 2, "test"), 0, 2, TIMEOUT)
    yield made
    made.stopped.set()


def watch(watchdog: Watchdog, seconds: float, *lanes: Collectives) -> None:
    lookout = Lookout(watchdog, lanes, on_device=True)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(lane.aborted for lane in lanes):
        time.sleep(0.01)
    lookout.stop()


def test_a_collective_that_waits_too_long_ends_all_lanes_and_the_next_call_names_rank_and_place(
    watchdog: Watchdog,
) -> None:
    stuck, idle = Collectives(lambda: "all_gather blocks.3"), Collectives(lambda: None)
    began = time.monotonic()
    watch(watchdog, 10.0, stuck, idle)
    assert TIMEOUT < time.monotonic() - began < 5.0
    assert stuck.aborted
    assert idle.aborted
    with pytest.raises(StallError, match=r"rank 0 waited for all_gather blocks\.3 .*rank 1 has died or left"):
        watchdog.check()


def test_collectives_that_go_on_slowly_are_left_alone(watchdog: Watchdog) -> None:
    lane = Collectives(lambda: int(time.monotonic() / (TIMEOUT / 2)))  # another one before the time is over
    watch(watchdog, 4 * TIMEOUT, lane)
    assert not lane.aborted
    watchdog.check()


def post_of_the_other(watchdog: Watchdog, joint: int) -> None:
    post = Post(1, joint, "somewhere", None, {})
    watchdog.store.ask(lambda store: store.set("zeroshard/test/1", json.dumps(post)), 5.0)


def test_a_rank_that_has_not_begun_what_this_rank_began_long_ago_is_found_without_the_device(
    watchdog: Watchdog,
) -> None:
    post_of_the_other(watchdog, 1)
    lane = Collectives(lambda: None, done=False)  # the device waits for something that is not on a lane
    for operation in ("all_gather blocks.0", "all_gather blocks.1"):
        watchdog.note(operation)
    began = time.monotonic()
    watch(watchdog, 10.0, lane)
    assert lane.aborted
    assert TIMEOUT < time.monotonic() - began < 5.0
    with pytest.raises(StallError, match=r"rank 0 waited for all_gather blocks\.1 .*rank 1 has died or left"):
        watchdog.check()


def test_a_rank_that_posts_no_more_is_not_waited_for_if_all_collectives_are_complete(watchdog: Watchdog) -> None:
    """It may have left, or run code that lets no other thread run: its last post is old, and nothing is wrong."""
    post_of_the_other(watchdog, 1)
    lane = Collectives(lambda: None)
    for _ in range(3):
        watchdog.note("all_gather blocks.0")
    watch(watchdog, 4 * TIMEOUT, lane)
    assert not lane.aborted
    watchdog.check()


def test_a_rank_that_is_as_far_as_this_one_may_take_its_time(watchdog: Watchdog) -> None:
    post_of_the_other(watchdog, 1)
    watchdog.note("all_gather blocks.0")
    for _ in range(5):
        watchdog.note("a gather that only some ranks make", joint=False)
    lane = Collectives(lambda: None)
    watch(watchdog, 4 * TIMEOUT, lane)
    assert not lane.aborted
    watchdog.check()


def test_a_rank_that_has_failed_is_not_waited_for(watchdog: Watchdog) -> None:
    watchdog.timeout = 60.0
    watchdog.store.ask(lambda store: store.set("zeroshard/test/failed", json.dumps((1, "no memory", time.time()))), 5.0)
    stuck = Collectives(lambda: "all_gather blocks.3")
    watch(watchdog, 10.0, stuck)
    assert stuck.aborted
    with pytest.raises(StallError, match="rank 1 failed: no memory"):
        watchdog.check()


class Event:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def test_a_lane_waits_for_other_ranks_only_if_all_work_of_this_rank_is_done() -> None:
    quiet = Watchdog(Posts(BoundedStore(dist.HashStore()), 0, 2, "test"), 0, 2, TIMEOUT)
    lane = Lane("gathers", None, Copies(0, 1), torch.device("cpu"), quiet)
    ready, done = [Event(), Event()], [Event(), Event()]
    operations: list[Any] = [_OnStream(ready[i], done[i], quiet, f"gather {i}") for i in range(2)]  # type: ignore[arg-type]
    lane._under_way.extend(operations)
    assert lane.waiting() is None, "a long backward is no stall"
    ready[0].done = True
    assert str(lane.waiting()) == "gather 0"
    done[0].done = True
    assert lane.waiting() is None
    ready[1].done = True
    assert str(lane.waiting()) == "gather 1"
    done[1].done = True
    assert lane.waiting() is None
    assert not lane._under_way
