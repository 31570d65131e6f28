"""The pool of rank processes that the other tests run on."""

from __future__ import annotations

import threading

import pytest

from tests.ranks import Pool


def ends() -> int:
    return 1


def hangs_here() -> None:
    threading.Event().wait()


@pytest.mark.slow
def test_a_rank_that_hangs_is_shown_where_it_does() -> None:
    pool = Pool()
    assert pool.run(ends, 1, {}) == [1]
    pool.patience = 2.0
    with pytest.raises(AssertionError, match=r"(?s)ranks \[0\] did not end within 2 s.*rank 0.*in hangs_here"):
        pool.run(hangs_here, 1, {})
    pool.patience = 120.0
    assert pool.run(ends, 1, {}) == [1]
    pool.close()
