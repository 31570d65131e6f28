"""The times of divided and offloaded checkpoints, compared with examples that were computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.gpts import step_time
from zeroshard import Activations
from zeroshard.plan.machine.profile import Launch, Link, Pcie, load
from zeroshard.plan.papers.shape import Transformer
from zeroshard.plan.setup import Setup
from zeroshard.plan.time.checkpoint_time import CheckpointTime
from zeroshard.plan.time.collective_time import ring
from zeroshard.plan.time.step_time import StepTime
from zeroshard.plan.time.timeline import Interval, Resource, Timeline

H200 = replace(load("h200"), launch=Launch())
SLOW = replace(H200, inside=Link(latency=0.0, bandwidth=0.5e6), pcie=Pcie(down=0.5e6, up=0.25e6))
NARROW = Transformer(layers=3, hidden=1000, heads=8, vocabulary=256)
"""A checkpoint of 1000 tokens in 16 bits is 2 MB. A fourth takes 1 s down and 2 s up. Gathering all parts takes 3 s."""


def checkpoints(timeline: Timeline, activations: Activations) -> CheckpointTime:
    setup = Setup(stage=2, model_parallel=4, sequence=1000, activations=activations)
    return CheckpointTime(NARROW.work(setup), setup, SLOW, ring(SLOW, 4, 1), timeline)


def test_parts_go_down_during_forward_and_come_up_before_they_are_gathered() -> None:
    timeline = Timeline()
    found = checkpoints(timeline, Activations(partition=True, offload=True))
    begins = []
    for _ in range(3):
        begins.append(found.send())
        timeline.run(Resource.DEVICE, 0.1, begins[-1])
    assert begins == [0.0, 0.0, 1.0], "two may be on their way; the third waits until the first has left"
    assert timeline.free(Resource.DEVICE) == pytest.approx(1.1)
    assert timeline.free(Resource.PCIE_DOWN) == pytest.approx(3.0)
    takes = []
    for block in (2, 1, 0):
        takes.append(found.bring_back(block))
        timeline.run(Resource.DEVICE, 1.0, takes[-1])
    # The last checkpoint has left at 3. It comes up at 3-5 and is gathered at 5-8; the one before at 8-10 and 10-13.
    # At 9 the device has recomputed the last block and asks for the second and the first. The first one comes after the
    # second: up at 13-15, gathered at 15-18.
    assert takes == pytest.approx([8.0, 13.0, 18.0])
    spent = timeline.exposed(Interval(3.0, 19.0), Resource.DEVICE, Resource.NODE_LINKS, Resource.PCIE_UP)
    assert spent == pytest.approx({Resource.DEVICE: 3.0, Resource.NODE_LINKS: 9.0, Resource.PCIE_UP: 6 - 2.0})


def test_without_offload_nothing_is_copied_and_without_division_nothing_is_gathered() -> None:
    divided, timeline = Activations(partition=True), Timeline()
    found = checkpoints(timeline, divided)
    assert [found.send() for _ in range(3)] == [0.0, 0.0, 0.0]
    assert [found.bring_back(block) for block in (2, 1, 0)] == pytest.approx([3.0, 6.0, 9.0])
    assert timeline.free(Resource.PCIE_DOWN) == timeline.free(Resource.PCIE_UP) == 0
    whole, timeline = Activations(offload=True, prefetch=0), Timeline()
    found = checkpoints(timeline, whole)
    assert [found.send() for _ in range(3)] == [0.0, 0.0, 4.0]
    assert [found.bring_back(block) for block in (2, 1, 0)] == pytest.approx([12 + 8, 12 + 16, 12 + 24])
    assert timeline.free(Resource.NODE_LINKS) == 0


WIDE = Transformer(layers=24, hidden=4096, heads=32, vocabulary=256, positions=1024)


def times(activations: Activations | None, machine: object = H200, **options: int) -> StepTime:
    setup = Setup(**{"stage": 0, "model_parallel": 8, "batch": 16, "activations": activations} | options)  # type: ignore[arg-type]
    return step_time(WIDE, setup, machine)  # type: ignore[arg-type]


STREAM = 16 * 1024 * 4096 * 2  # bytes of a checkpoint


@pytest.mark.parametrize("max_unit_bytes", [1 << 30, 16 << 20])
def test_a_backward_waits_only_for_its_first_checkpoint(max_unit_bytes: int) -> None:
    plain, divided, offloaded = (
        times(activations, max_unit_bytes=max_unit_bytes)
        for activations in (None, Activations(partition=True), Activations(partition=True, offload=True))
    )
    gather, up = ring(H200, 8, 1).seconds(STREAM), STREAM / 8 / H200.pcie.up
    assert divided.exposed_node_links - plain.exposed_node_links == pytest.approx(gather)
    assert divided.total - plain.total == pytest.approx(gather)
    assert offloaded.total - plain.total == pytest.approx(gather + up)
    assert offloaded.exposed_pcie == pytest.approx(up)


def test_every_micro_batch_has_its_checkpoints() -> None:
    for count in (2, 5):
        plain, divided = (times(way, micro_batches=count).total for way in (None, Activations(partition=True)))
        assert divided - plain == pytest.approx(count * ring(H200, 8, 1).seconds(STREAM))


def test_a_slow_link_to_the_host_is_what_a_step_waits_for() -> None:
    slow = replace(H200, pcie=Pcie(down=1e8, up=5e7))
    step = times(Activations(partition=True, offload=True), slow)
    assert step.exposed_pcie == pytest.approx(24 * STREAM / 8 * (1 / 1e8 + 1 / 5e7), rel=0.05)


def test_what_stays_on_the_device_takes_no_time() -> None:
    assert times(Activations()) == times(None)
    recomputed_by_nobody = Setup(stage=0, model_parallel=8, batch=16, checkpointing=False)
    divided = replace(recomputed_by_nobody, activations=Activations(partition=True))
    assert step_time(WIDE, divided, H200) == step_time(WIDE, recomputed_by_nobody, H200)
