"""The pool of rank processes that the other tests run on."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from tests.ranks import Pool


def ends() -> int:
    return 1


def hangs_here() -> None:
    threading.Event().wait()


def fails_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        raise ValueError("on purpose")
    hangs_here()


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


@pytest.mark.slow
def test_a_rank_that_fails_is_shown_with_those_that_wait_for_it_and_the_pool_is_replaced() -> None:
    pool = Pool(grace=1.0)
    with pytest.raises(AssertionError, match=r"(?s)ranks \[1\] .* 1 s.*rank 0.*on purpose.*rank 1.*in hangs_here"):
        pool.run(fails_on_rank_zero, 2, {})
    assert pool.run(ends, 2, {}) == [1, 1]
    pool.close()
