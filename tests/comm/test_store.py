"""A store that does not answer holds nobody up."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from zeroshard.comm.posts import Post, Posts
from zeroshard.comm.store import BoundedStore, StoreError
from zeroshard.comm.watchdog import Watchdog


class Frozen:
    """A store whose process is stopped until ``thaw``."""

    def __init__(self) -> None:
        self.thaw = threading.Event()
        self._real = dist.HashStore()

    def __getattr__(self, name: str) -> Any:
        self.thaw.wait(60)
        return getattr(self._real, name)


def test_a_call_of_a_frozen_store_ends_in_time_and_the_store_may_come_back() -> None:
    frozen = Frozen()
    store = BoundedStore(frozen)
    began = time.monotonic()
    with pytest.raises(StoreError, match="does not answer") as caught:
        store.ask(lambda s: s.set("key", "value"), 0.2)
    assert not caught.value.lost
    with pytest.raises(StoreError, match="does not answer"):
        store.ask(lambda s: s.get("key"), 0.2)
    assert time.monotonic() - began < 5.0
    frozen.thaw.set()
    assert store.ask(lambda s: s.get("key"), 5.0) == b"value", "a late answer does not fail the next call"
    store.stop(5.0)


def test_a_store_that_is_gone_is_told_from_one_that_is_silent() -> None:
    def gone(store: Any) -> None:
        raise dist.DistNetworkError("connection lost")

    store = BoundedStore(dist.HashStore())
    with pytest.raises(StoreError, match="cannot be reached: connection lost") as caught:
        store.ask(gone, 5.0)
    assert caught.value.lost
    store.stop(5.0)


def test_a_call_that_fails_in_any_way_leaves_the_store_usable() -> None:
    store = BoundedStore(dist.HashStore())
    with pytest.raises(StoreError, match="no number"):
        store.ask(lambda s: int("no number"), 5.0)
    assert store.ask(lambda s: 7, 5.0) == 7
    store.stop(5.0)


def test_a_failure_of_an_earlier_try_of_the_job_is_not_this_ones() -> None:
    shared = dist.HashStore()
    Posts(BoundedStore(shared), 1, 2, "test").fail("in the last try")
    again = Posts(BoundedStore(shared), 0, 2, "test")
    assert again.failure() is None


def test_the_first_failure_counts_and_is_not_told_to_its_own_rank() -> None:
    shared = dist.HashStore()
    ranks = [Posts(BoundedStore(shared), rank, 3, "test") for rank in range(3)]
    ranks[1].fail("the first")
    ranks[2].fail("a consequence")
    assert ranks[0].failure() == ranks[2].failure() == "rank 1 failed: the first"
    assert ranks[1].failure() is None
    ranks[0].post(Post(1, 2, "a place", None, {"step()": 3}))
    assert ranks[2].store.ask(lambda store: None, 5.0) is None
    deadline = time.monotonic() + 5
    while not ranks[2].read_all() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ranks[2].read_all() == {0: Post(1, 2, "a place", None, {"step()": 3})}
    for posts in ranks:
        posts.store.stop(5.0)


def test_a_stall_is_explained_in_time_although_the_store_is_frozen() -> None:
    frozen = Frozen()
    watchdog = Watchdog(Posts(BoundedStore(frozen), 1, 2, "test"), 1, 2, 5.0)
    began = time.monotonic()
    text = watchdog.explain("a gather")
    assert time.monotonic() - began < 5.0
    assert "rank 0, which has the store of the process group, does not answer: it is stopped" in text
    frozen.thaw.set()
