from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.nccl.processes import rehearsing
from tests.offload import scenarios
from tests.ranks import Pool

ON_GPU, ON_NCCL = Path(__file__).parent / "gpu", Path(__file__).parent / "nccl"


@pytest.fixture(scope="session", autouse=True)
def rank_pool() -> Iterator[None]:
    yield
    Pool.shared().close()


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector, which many tests ask, need not look at it again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU the tests that need one are skipped, and the summary says so."""
    if torch.cuda.is_available():
        return
    folders = (ON_GPU,) if rehearsing() else (ON_GPU, ON_NCCL)
    for item in items:
        if any(folder in item.path.parents for folder in folders):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of offload: torch's threads would take the cores from the host's."""
    with scenarios.one_thread():
        yield
