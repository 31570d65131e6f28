"""The thread that posts where a rank is."""

from __future__ import annotations

import subprocess
import sys

ENDS_WHILE_POSTING = """
import time
import torch.distributed as dist
from zeroshard.observe import watchdog

watchdog.BEAT_SECONDS = 0.0
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
posting = watchdog.Watchdog.start(0, 1, "some")
while posting._beat < 50:
    time.sleep(0.01)
"""


def test_a_process_that_ends_while_its_rank_is_posted_ends_well() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_WHILE_POSTING], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
