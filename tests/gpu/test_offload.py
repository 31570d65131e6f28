"""Offload on a real device: copies on their own streams, pinned memory, and the same bits whatever overlaps."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zeroshard
from tests.gpu.test_one_process import fake_world, inputs, step_without_synchronisation
from tests.models import batch, net
from tests.ranks import Pool
from zeroshard import Offload
from zeroshard.runtime import runtime_of

BF16 = torch.bfloat16
WAYS: dict[str, dict[str, Any]] = {
    "fp32 states": {},
    "split master": {"split_master": True},
    "16-bit states": {"split_master": True, "moments": BF16},
    "8-bit moments": {"split_master": True, "moments": "8bit"},
    "8-bit moments, read back, in backward": {
        "split_master": True,
        "moments": "8bit",
        "read_back": True,
        "update_in_backward": True,
    },
    "8-bit moments, delayed": {"split_master": True, "moments": "8bit", "delayed_update_after": 2},
    "read back": {"split_master": True, "read_back": True},
    "update in backward": {"update_in_backward": True},
    "update in backward, read back": {"update_in_backward": True, "split_master": True, "read_back": True},
    "delayed": {"delayed_update_after": 2},
    "delayed, split": {"delayed_update_after": 2, "split_master": True},
    "half on the host": {"host_fraction": 0.5},
}


def train(steps: int = 6, micro_batches: int = 1, **options: Any) -> tuple[Any, Any, list[float]]:
    model = net(width=256, depth=6)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    model, optimizer = zeroshard.shard(model, optimizer, **{"stage": 2, "precision": "bf16", **options})
    losses = []
    for step in range(steps):
        for micro in range(micro_batches):
            loss = model(inputs(10 * step + micro)).float().square().mean()
            (loss / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    zeroshard.synchronize(model)
    return model, optimizer, losses


def weights(model: Any) -> dict[str, Tensor]:
    return zeroshard.full_state_dict(model)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_step_that_does_not_block_gives_the_bits_of_one_that_does(way: str, clip: float | None) -> None:
    options = WAYS[way]
    if clip is not None and options.get("update_in_backward"):
        pytest.skip("refused together")
    results = [train(offload=Offload(blocking=blocking, **options), clip_grad_norm=clip) for blocking in (False, True)]
    assert results[0][2] == results[1][2]
    assert_same(weights(results[0][0]), weights(results[1][0]))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_host_trains_as_the_device_does(stage: int) -> None:
    _, _, expected = train(stage=stage, clip_grad_norm=0.5)
    _, _, found = train(stage=stage, clip_grad_norm=0.5, offload="cpu")
    assert found == pytest.approx(expected, rel=2e-2)


def test_masters_split_or_read_back_and_parameters_on_the_host_change_no_bit() -> None:
    expected = weights(train(offload="cpu")[0])
    for options in (
        WAYS["split master"],
        WAYS["read back"],
        WAYS["update in backward"],
        WAYS["update in backward, read back"],
    ):
        assert_same(weights(train(offload=Offload(**options))[0]), expected)
    assert_same(weights(train(stage=3, offload=Offload(parameters="cpu"))[0]), expected)


def test_micro_batches_add_up_on_the_host() -> None:
    _, _, expected = train(micro_batches=3, clip_grad_norm=0.5)
    for options in (WAYS["fp32 states"], WAYS["read back"]):
        _, _, found = train(micro_batches=3, clip_grad_norm=0.5, offload=Offload(**options))
        assert found == pytest.approx(expected, rel=2e-2)


def test_the_device_keeps_parameters_alone_and_the_host_what_was_counted_pinned() -> None:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model, _, _ = train(offload="cpu")
    gc.collect()
    runtime = runtime_of(model)
    parameters = zeroshard.stats(model).padded_parameters
    assert torch.cuda.memory_allocated() - before < 2.1 * parameters + (1 << 16)
    assert runtime.pipeline is not None
    for states in runtime.pipeline.buffers:
        assert states.slot is not None
        assert states.slot.is_pinned()
        assert not states.stored.is_pinned()
    size = runtime.pipeline.bytes
    assert 2 * parameters <= size.pinned < 2.05 * parameters
    assert 12 * parameters <= size.pageable < 12.05 * parameters


def test_four_bytes_a_parameter_cross_between_host_and_device_and_six_with_parameters_on_the_host() -> None:
    for options, stage, expected in (({}, 2, 4), ({"parameters": "cpu"}, 3, 6), (WAYS["read back"], 2, 6)):
        more: dict[str, Any] = {"keep": ()} if stage == 3 else {}
        model, optimizer, _ = train(stage=stage, offload=Offload(blocking=True, **options), **more)
        for step in range(2):
            model(inputs(step)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = zeroshard.stats(model)
        assert sum(stats.host_traffic.values()) == pytest.approx(expected * stats.padded_parameters, rel=0.01)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_forward_and_backward_with_offload_do_not_synchronise_in_a_fake_world_of_eight(stage: int) -> None:
    with fake_world(8):
        model = net(width=256, depth=6)
        optimizer: Any = torch.optim.AdamW(model.parameters())
        model, optimizer = zeroshard.shard(
            model, optimizer, stage=stage, precision="bf16", clip_grad_norm=1.0, offload="cpu"
        )
        for step in range(4):
            step_without_synchronisation(model, optimizer, step)
        zeroshard.synchronize(model)


def compare_with_device(stage: int) -> None:
    results = []
    for offload in (None, "cpu", Offload(blocking=True)):
        model = net(width=96)
        options = {"device": "cuda:0", "stage": stage, "precision": "bf16", "clip_grad_norm": 0.5, "offload": offload}
        model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), **options)
        for step in range(4):
            model(batch(step).cuda()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=2e-2, atol=2e-2)
        assert torch.equal(results[1][name], results[2][name]), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_that_share_a_gpu_offload_their_own_shards(stage: int) -> None:
    Pool.shared().run(compare_with_device, 2, {"stage": stage})


def test_a_trace_has_every_phase_by_the_devices_clock(tmp_path: Path) -> None:
    model, optimizer, _ = train(offload="cpu")
    with zeroshard.trace(tmp_path / "trace.json") as trace:
        model(inputs(0)).float().square().mean().backward()
        optimizer.step()
        zeroshard.synchronize(model)
    tracks = {event["tid"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert len(tracks) == 4
    assert all(span.stop >= span.start for span in trace.spans)
    first = next(span for span in trace.spans if span.track == "host update")
    last = max(span.stop for span in trace.spans if span.name.startswith("backward"))
    assert first.stop > last  # clocks agree: an update ends after the backward that it waits for
