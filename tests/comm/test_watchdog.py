"""The thread that posts the progress of a rank."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import torch.distributed as dist

from zeroshard.system import compat_groups

ENDS_WHILE_POSTING = """
import time
import torch.distributed as dist
from zeroshard.comm import posts
from zeroshard.comm.lookout import Lookout
from zeroshard.comm.store import BoundedStore
from zeroshard.comm.watchdog import Watchdog
from zeroshard.system import compat_groups

posts.BEAT_SECONDS = 0.0
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
watchdog = Watchdog(posts.Posts(BoundedStore(compat_groups.default_store()), 0, 1, "some"), 0, 1, 1.0)
lookout = Lookout(watchdog)
while watchdog._beat < 50:
    time.sleep(0.01)
"""


def test_a_process_that_ends_while_its_rank_is_posted_ends_well() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_WHILE_POSTING], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_the_connection_to_the_store_does_not_keep_the_store_of_a_group_that_was_ended() -> None:
    """Else the old server would answer, with old addresses, when a new group begins on the same port."""
    store = dist.TCPStore("localhost", 0, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert compat_groups.default_store() is compat_groups.default_store()
        old = weakref.ref(dist.distributed_c10d._get_default_store())
    finally:
        dist.destroy_process_group()
    del store
    gc.collect()
    assert old() is None
