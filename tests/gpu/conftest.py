from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

# torch wants this where only deterministic kernels are allowed.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

PATIENCE = 5.0
"""Seconds until a thread must have seen that its model is gone. A failed test's model is not."""
LONGEST = 150.0
"""Seconds of one test: more than ranks are waited for."""


@pytest.fixture(autouse=True)
def a_hang_is_named() -> Iterator[None]:
    """A test that waits for ever says where, and ends the run: a device is not to be held for nothing."""
    if torch.cuda.is_available():
        faulthandler.dump_traceback_later(LONGEST, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def leave_nothing_behind() -> Iterator[None]:
    """Memory is compared before and after: what the last test has left must be gone, and its threads with it."""
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("zeroshard "):
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"{thread.name} outlives its model"
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
