from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

PATIENCE = 30.0


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU these tests are skipped, and the summary says so."""
    if torch.cuda.is_available():
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
