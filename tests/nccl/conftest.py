from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nccl.processes import pool


@pytest.fixture(scope="session", autouse=True)
def nccl_pool() -> Iterator[None]:
    yield
    if pool.cache_info().currsize:
        pool().close()


@pytest.fixture
def fresh_ranks() -> None:
    """The test gets new processes.

    torch 2.11 crashes in ``split_group``, which makes the groups of a mesh, if the process has ended a group of NCCL.
    """
    pool().close()
