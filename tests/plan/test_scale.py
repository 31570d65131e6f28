"""Scaling to more devices, and the cost of whole trainings."""

from __future__ import annotations

import pytest

from zeroshard.plan.machine.profile import load
from zeroshard.plan.papers.shape import Transformer
from zeroshard.plan.setup import Setup
from zeroshard.plan.time.scale import cost, doubling, scale, tokens_a_step

H200 = load("h200")
GPT = Transformer(layers=32, hidden=4096, heads=32, vocabulary=50304, positions=1024)


def test_exposed_communication_grows_with_devices_and_efficiency_falls() -> None:
    points = scale(GPT.work(Setup(stage=3, batch=2)), Setup(stage=3, batch=2), H200, doubling(8, 8192))
    assert [point.devices for point in points][-1] == 8192
    assert 0 < points[-1].efficiency < max(point.efficiency for point in points) <= 1
    exposed = [point.exposed for point in points]
    assert exposed == sorted(exposed)


def test_devices_that_model_parallelism_does_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="12 devices cannot be divided into groups of model_parallel=8"):
        scale(GPT.work(Setup(stage=2)), Setup(stage=2, model_parallel=8), H200, [12])


@pytest.mark.parametrize(("first", "last"), [(0, 8), (16, 8)])
def test_a_bad_range_is_refused(first: int, last: int) -> None:
    with pytest.raises(ValueError, match="the smaller first"):
        doubling(first, last)


def test_cost_is_steps_times_their_time() -> None:
    setup = Setup(stage=2, world=8, batch=4)
    spent = cost(GPT.work(setup), setup, H200, tokens=10 * tokens_a_step(setup))
    assert spent.steps == 10
    assert spent.device_hours == pytest.approx(8 * spent.seconds / 3600)
    assert spent.days == pytest.approx(spent.seconds / 86400)
    with pytest.raises(ValueError, match="tokens=0"):
        cost(GPT.work(setup), setup, H200, tokens=0)
