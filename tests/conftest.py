from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Pool


@pytest.fixture(scope="session", autouse=True)
def rank_pool() -> Iterator[None]:
    yield
    Pool.shared().close()
