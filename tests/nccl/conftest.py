from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nccl.processes import pool


@pytest.fixture(scope="session", autouse=True)
def nccl_pool() -> Iterator[None]:
    yield
    if pool.cache_info().currsize:
        pool().close()
