"""Exposed waits: what a rank waited for with nothing else to do, on CPU ranks and by a GPU's events."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.ranks import on_ranks
from zeroshard import Offload
from zeroshard.offload.kernel import Pool
from zeroshard.system.waits import Cause, Waits

PAUSE = 0.1


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def sharded(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(8, 8)
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters()), device="cpu", **options)


def test_a_rank_alone_that_offloads_nothing_waits_for_nothing() -> None:
    model, optimizer = sharded(stage=3)
    step(model, optimizer)
    assert set(zeroshard.stats(model).exposed_waits.values()) == {0.0}


@pytest.mark.parametrize("blocking", [False, True])
def test_the_wait_for_updates_on_the_host_is_counted(blocking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = sharded(stage=2, offload=Offload(blocking=blocking))
    update = Pool.update

    def late(*given: Any) -> None:
        time.sleep(PAUSE)
        update(*given)

    monkeypatch.setattr(Pool, "update", late)
    step(model, optimizer)
    model(torch.ones(2, 8))  # waits for the update, unless the step did
    waits = zeroshard.stats(model).exposed_waits
    assert waits["host_update"] >= 0.8 * PAUSE
    assert waits["collectives"] == waits["agreement"] == 0


def test_an_update_that_is_hidden_costs_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = sharded(stage=2, offload=Offload())
    step(model, optimizer)
    zeroshard.synchronize(model)  # as if the program had done something else meanwhile
    before = zeroshard.stats(model).exposed_waits["host_update"]
    model(torch.ones(2, 8))
    assert zeroshard.stats(model).exposed_waits["host_update"] == before


@on_ranks(2)
def test_the_wait_for_a_rank_that_is_late_is_counted_on_the_other() -> None:
    model, optimizer = sharded(stage=3)
    step(model, optimizer)
    before = zeroshard.stats(model).exposed_waits
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(3 * PAUSE)
    step(model, optimizer)
    after = zeroshard.stats(model).exposed_waits
    for_ranks = sum(after[cause] - before[cause] for cause in ("collectives", "agreement"))
    if dist.get_rank() == 0:
        assert for_ranks >= 2 * PAUSE
    assert after["host_update"] == 0


@dataclass
class Device:
    """A device's clock: events get the time at which the device reaches them."""

    now: float = 0.0
    busy_until: float = 0.0
    events: list[Event] = field(default_factory=list)


DEVICE = Device()


class Event:
    """An event on the device of this test."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.reached = 0.0

    def record(self, stream: object) -> None:
        assert stream == "the current stream"
        self.reached = max(DEVICE.now, DEVICE.busy_until)

    def query(self) -> bool:
        return self.reached <= DEVICE.now

    def elapsed_time(self, other: Event) -> float:
        assert self.query()
        assert other.query(), "it would raise on a device"
        return (other.reached - self.reached) * 1e3


def test_on_a_gpu_only_the_time_counts_in_which_the_device_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current stream")
    waits = Waits(torch.device("cuda", 0))
    DEVICE.now, DEVICE.busy_until = 0.0, 3.0
    began = waits.begin()
    DEVICE.now = 2.0  # the thread waited 2 s, and the device computed all the while
    waits.end(Cause.HOST_UPDATE, began)
    assert waits.seconds()["host_update"] == 0  # not known yet, and nobody waits to know it
    DEVICE.now = 4.0
    assert waits.seconds()["host_update"] == 0
    DEVICE.busy_until = 5.0
    began = waits.begin()
    DEVICE.now = 7.5  # of these 3.5 s the device computed one
    waits.end(Cause.HOST_UPDATE, began)
    assert waits.seconds()["host_update"] == 2.5
    assert waits.seconds()["gradient_copies"] == 0
