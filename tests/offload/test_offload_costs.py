"""What offload moves and holds, and how it fails and ends."""

from __future__ import annotations

import gc
import re
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

import zeroshard
from tests.matrix import Stages, in_stages
from tests.models import loss_of, net
from tests.offload.offloaded import (
    BF16,
    DELAYED,
    IN_BACKWARD,
    ON_HOST,
    READ_BACK,
    sharded,
    train,
)
from tests.offload.scenarios import (
    adamw,
    small,
)
from tests.ranks import on_ranks
from tests.storages import live_bytes
from zeroshard import Offload, OffloadError, StallError
from zeroshard.offload.kernel import Pool
from zeroshard.system import machine

pytestmark = pytest.mark.usefixtures("one_thread")


def traffic_of(model: Any, optimizer: Any, steps: int = 3) -> tuple[float, float]:
    """Bytes a parameter, down and up: the same in every step once there is something to publish."""
    train(model, optimizer, range(2))
    found = set()
    for step in range(steps):
        train(model, optimizer, range(step, step + 1))
        stats = zeroshard.stats(model)
        found.add(tuple(stats.host_traffic[way] / stats.padded_parameters for way in ("to the host", "to the device")))
    assert len(found) == 1, found
    return found.pop()


def test_a_step_moves_two_bytes_a_parameter_each_way_and_six_in_all_where_parameters_come_and_go() -> None:
    for stage, options, down, up in (
        (0, {}, 2, 2),
        (2, {"clip_grad_norm": 1.0}, 2, 2),
        (3, {}, 2, 2),
        (2, {"offload": IN_BACKWARD}, 2, 2),
        (2, {"offload": READ_BACK}, 4, 2),
        (2, {"offload": replace(READ_BACK, update_in_backward=True)}, 4, 2),
        (3, {"offload": ON_HOST, "keep": ()}, 2, 4),
        (2, {"offload": Offload(delayed_update_after=0)}, 2, 2),
        (2, {"offload": Offload(blocking=True)}, 2, 2),
    ):
        assert traffic_of(*sharded(**{"offload": "cpu", **options}, stage=stage, **BF16)) == (down, up), options
    assert traffic_of(*sharded(stage=2)) == (4, 4), "fp32"


@on_ranks(2)
def test_each_rank_moves_its_share() -> None:
    for stage in (1, 2, 3):
        model, optimizer = sharded("cpu", stage=stage, **BF16)
        train(model, optimizer, range(3))
        stats = zeroshard.stats(model)
        share = 2 * stats.padded_parameters // 2
        assert dict(stats.host_traffic) == {"to the host": share, "to the device": share}, f"stage {stage}"


@on_ranks(2)
def test_offload_changes_nothing_about_the_volume_between_ranks() -> None:
    delayed = Offload(delayed_update_after=0)
    for stage, psi, offloads in (
        (0, 2, [delayed]),
        (1, 2, [Offload(), delayed]),
        (2, 2, [IN_BACKWARD]),
        (3, 3, [ON_HOST]),
    ):
        for offload in offloads:
            model, optimizer = sharded(offload, stage=stage, **({"keep": ()} if stage == 3 else {}), **BF16)
            train(model, optimizer, range(4))
            stats = zeroshard.stats(model)
            assert stats.volume_elements == psi * stats.padded_parameters, f"stage {stage}: {offload}"


def settled(look: Callable[[], int], expected: int) -> int:
    """A value that the host's threads bring about in a moment."""
    deadline = time.monotonic() + 5
    while look() != expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return look()


@on_ranks(2)
def test_between_backward_and_step_the_device_has_parameters_alone() -> None:
    for stage, offload in ((0, Offload()), (1, IN_BACKWARD), (2, Offload()), (3, IN_BACKWARD), (3, Offload())):
        model, optimizer = sharded(offload, stage=stage, **BF16)
        for step in range(2):
            loss = loss_of(model, step)
            loss.backward()
            del loss
            assert settled(lambda model=model: zeroshard.stats(model).memory.gradients, 0) == 0
            memory = zeroshard.stats(model).memory
            whole = 2 * zeroshard.stats(model).padded_parameters
            assert memory.total == memory.parameters == whole // (2 if stage == 3 else 1), f"stage {stage}"
            optimizer.step()
            optimizer.zero_grad()


@in_stages
@on_ranks(2)
def test_host_memory_is_divided_among_ranks_as_optimizer_states_are(stages: Stages) -> None:
    for stage in stages:
        model, optimizer = sharded(stage=stage, **BF16)
        train(model, optimizer, range(2))
        stats = zeroshard.stats(model)
        assert stats.host_memory is not None
        assert stats.host_memory.total == 14 * stats.padded_parameters // (2 if stage else 1), f"stage {stage}"


def test_nothing_grows_after_the_second_step() -> None:
    for stage, offload in ((2, Offload()), (3, ON_HOST), (2, replace(READ_BACK, update_in_backward=True))):
        model, optimizer = sharded(offload, stage=stage, **BF16)
        sizes = []
        for step in range(5):
            if not offload.update_in_backward and not offload.delayed_update_after:
                loss_of(model, 10 + step).backward()
            train(model, optimizer, range(step, step + 1))
            zeroshard.synchronize(model)
            if step in (2, 4):
                sizes.append(live_bytes())
        assert len(set(sizes)) == 1, f"{offload}: {sizes}"


def test_live_memory_is_what_the_ledger_says() -> None:
    before = live_bytes()
    model = net(width=96, depth=3)
    model, optimizer = zeroshard.shard(model, adamw(model), stage=2, precision="bf16", offload="cpu")
    train(model, optimizer, range(2))
    zeroshard.synchronize(model)
    stats = zeroshard.stats(model)
    assert stats.host_memory is not None
    assert live_bytes() - before == pytest.approx(stats.memory.total + stats.host_memory.total, rel=0.01)


@on_ranks(2)
def test_a_host_that_is_too_small_for_one_rank_is_said_on_all() -> None:
    available = machine.available_memory
    machine.available_memory = (lambda: 4000) if dist.get_rank() else available
    model = small()
    try:
        with pytest.raises(ValueError, match=r"offload needs .* of host memory a rank .*, or add ranks"):
            zeroshard.shard(model, adamw(model), stage=2, offload=Offload())
    finally:
        machine.available_memory = available
    zeroshard.shard(model, adamw(model), stage=2, offload=Offload())


@pytest.mark.parametrize("stage", [2, 3])
def test_an_update_that_fails_is_heard_in_the_next_call_and_in_all_later_ones(stage: int) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("the kernel is ill")

    original = Pool.update
    for offload in (Offload(), IN_BACKWARD, Offload(delayed_update_after=0), READ_BACK):
        model, optimizer = sharded(offload, stage=stage, **BF16)
        train(model, optimizer, range(1))
        zeroshard.synchronize(model)
        Pool.update = fail
        try:
            with pytest.raises(OffloadError, match="the kernel is ill") as first:
                train(model, optimizer, range(1, 4))
        finally:
            Pool.update = original
        causes = [first.value.__cause__, getattr(first.value.__cause__, "__cause__", None)]
        assert any(isinstance(cause, ArithmeticError) for cause in causes)
        for call in (
            lambda model=model: zeroshard.synchronize(model),
            lambda optimizer=optimizer: optimizer.state,
            lambda optimizer=optimizer: optimizer.state_dict(),
        ):
            with pytest.raises(OffloadError, match="checkpoint"):
                call()


@pytest.mark.slow
@on_ranks(2)
def test_an_update_that_fails_on_one_rank_is_known_by_name_on_the_others() -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("the kernel is ill")

    original, rank = Pool.update, dist.get_rank()
    for stage in (2, 3):
        model, optimizer = sharded(Offload(), stage=stage, stall_timeout=4.0, **BF16)
        train(model, optimizer, range(1))
        zeroshard.synchronize(model)
        dist.barrier()
        if rank == 1:
            Pool.update = fail
        began = time.monotonic()
        try:
            with pytest.raises(OffloadError if rank == 1 else StallError) as raised:
                train(model, optimizer, range(1, 4))
        finally:
            Pool.update = original
        if rank == 0:
            expected = (
                r"rank 0 waited for .*, and rank 1 failed: the host's update failed \(ArithmeticError: the kernel"
            )
            assert re.search(expected, str(raised.value)), raised.value
            assert time.monotonic() - began < 4.0 + 6.0, "the word that was left is read at once"
        dist.barrier()


def test_a_model_that_nobody_uses_any_more_goes_and_takes_its_threads_along() -> None:
    import threading

    def host_threads() -> int:
        return sum(thread.name.startswith("zeroshard ") for thread in threading.enumerate())

    gc.collect()
    before, memory = host_threads(), live_bytes()
    for stage, offload in ((2, Offload()), (3, ON_HOST), (2, IN_BACKWARD), (2, DELAYED)):
        model, optimizer = sharded(offload, stage=stage)
        train(model, optimizer, range(2))
        gone = weakref.ref(model)
        del model, optimizer
        gc.collect()
        assert gone() is None, offload
        until = time.monotonic() + 10
        while host_threads() > before and time.monotonic() < until:  # those of earlier tests may end meanwhile, too
            time.sleep(0.01)
        assert host_threads() <= before
    assert live_bytes() <= memory
