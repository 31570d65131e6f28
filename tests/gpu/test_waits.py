"""Exposed waits on a GPU: the time in which the device stood still, not the time in which the thread was blocked."""

from __future__ import annotations

import time

import pytest
import torch

from zeroshard.system.waits import Cause, Waits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
PAUSE = 0.05


def test_a_wait_behind_which_the_device_computes_is_not_exposed() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    waits, matrix = Waits(device), torch.randn(4096, 4096, device=device)
    for _ in range(3):
        matrix @ matrix
    torch.cuda.synchronize()

    began = waits.begin()
    time.sleep(PAUSE)
    waits.end(Cause.HOST_UPDATE, began)
    torch.cuda.synchronize()
    exposed = waits.seconds()["host_update"]
    assert exposed == pytest.approx(PAUSE, rel=0.5)

    start = time.perf_counter()
    while time.perf_counter() - start < PAUSE / 5:  # launched far faster than computed
        matrix @ matrix
    began = waits.begin()
    time.sleep(PAUSE / 50)
    waits.end(Cause.HOST_UPDATE, began)
    torch.cuda.synchronize()
    assert waits.seconds()["host_update"] - exposed < PAUSE / 50
