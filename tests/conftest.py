from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.offload import scenarios
from tests.ranks import Pool


@pytest.fixture(scope="session", autouse=True)
def rank_pool() -> Iterator[None]:
    yield
    Pool.shared().close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of offload: torch's threads would take the cores from the host's."""
    with scenarios.one_thread():
        yield
