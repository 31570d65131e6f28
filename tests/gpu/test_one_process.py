"""One process on one GPU: NCCL with one rank, fake worlds, host synchronisation, memory as the allocator counts it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import zeroshard
from tests.models import Net, net
from zeroshard.comm.fabric import Fabric
from zeroshard.comm.lane import Lane
from zeroshard.comm.transport import Collectives

STAGES = (0, 1, 2, 3)
DEVICE = torch.device("cuda", 0)


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def nccl_world_of_one() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def wide(**options: Any) -> tuple[Any, Any]:
    model = net(width=256, depth=6)
    return zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), **options)


def inputs(step: int) -> torch.Tensor:
    return torch.randn(32, 7, generator=torch.Generator().manual_seed(step)).cuda()


def step_without_synchronisation(model: Net, optimizer: Any, step: int) -> None:
    x = inputs(step)
    with synchronisation_is_an_error():
        loss = model(x).float().square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_forward_and_backward_never_wait_for_the_device_in_a_fake_world_of_eight(stage: int, precision: str) -> None:
    with fake_world(8):
        model, optimizer = wide(stage=stage, precision=precision, clip_grad_norm=1.0)
        for step in range(4):
            step_without_synchronisation(model, optimizer, step)


@pytest.mark.parametrize("stage", STAGES)
def test_forward_and_backward_never_wait_for_the_device_under_nccl(stage: int) -> None:
    with nccl_world_of_one():
        model, optimizer = wide(stage=stage, precision="bf16", clip_grad_norm=1.0)
        for step in range(4):
            step_without_synchronisation(model, optimizer, step)


def test_the_three_collectives_run_on_nccl_on_their_own_stream_without_waiting() -> None:
    with nccl_world_of_one():
        fabric = Fabric(DEVICE, 30.0)
        lane = Lane("gathers", dist.group.WORLD, Collectives(dist.group.WORLD, "nccl"), DEVICE, fabric.watchdog)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            source = torch.randn(1 << 16, device=DEVICE).to(dtype)
            whole, out = torch.zeros_like(source), torch.zeros_like(source)
            kept = source.clone()
            torch.cuda.synchronize()
            with synchronisation_is_an_error():
                lane.all_gather(whole, source, "a").wait()
                lane.reduce_scatter(source, out, "b").wait()
                lane.all_reduce(source, "c").wait()
            assert torch.equal(whole, kept)
            assert torch.equal(out, kept)
            assert torch.equal(source, kept)


@pytest.mark.parametrize("stage", STAGES)
def test_a_world_of_one_trains_bitwise_as_plain_torch(stage: int) -> None:
    plain = net(width=256, depth=6).cuda()
    other = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model, optimizer = wide(stage=stage)
    for step in range(4):
        for each, each_optimizer in ((model, optimizer), (plain, other)):
            each(inputs(step)).square().mean().backward()
            each_optimizer.step()
            each_optimizer.zero_grad()
    for name, value in zeroshard.full_state_dict(model).items():
        assert torch.equal(value, plain.state_dict()[name].cpu()), name


@pytest.mark.parametrize("stage", STAGES)
def test_the_ledger_is_what_the_cuda_allocator_counts(stage: int) -> None:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    with fake_world(4):
        model = net(width=512, depth=6)
        model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=stage, precision="bf16")

        def compare() -> None:
            torch.cuda.synchronize()
            gc.collect()
            found = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
            assert found == pytest.approx(zeroshard.stats(model).memory.total, rel=0.02)

        compare()
        for step in range(3):
            model(inputs(step)).float().square().mean().backward()
            compare()
            optimizer.step()
            compare()
            optimizer.zero_grad()


def test_a_model_on_the_cpu_moves_to_the_device_unit_by_unit() -> None:
    model = net(width=512, depth=16)
    size = sum(p.numel() for p in model.parameters()) * 4
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with fake_world(64):
        model, _ = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
        assert all(p.is_cuda for p in model.parameters())
        assert torch.cuda.max_memory_allocated() - before < size / 3


def test_gathered_memory_is_reused_and_does_not_grow_with_depth() -> None:
    """C_B and the streams' rule on reuse: the peak above the shards is a few units, however many there are."""
    peaks = []
    for depth in (6, 24):
        gc.collect()
        torch.cuda.empty_cache()
        with fake_world(64):
            model = net(width=512, depth=depth)
            model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=1e-3), stage=3)
            x = inputs(0)
            for _ in range(3):
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                rest = torch.cuda.memory_allocated()
                model(x).square().mean().backward()
                torch.cuda.synchronize()
                peaks.append(torch.cuda.max_memory_allocated() - rest)
                optimizer.step()
                optimizer.zero_grad()
            shards = zeroshard.stats(model).padded_parameters * 4 / 64
            peaks[-1] -= int(shards)  # gradients at rest do grow with depth
            del model, optimizer, x
    unit = 4 * (2 * 3 * 512 * 512)
    assert peaks[5] - peaks[2] < 2 * unit, peaks
