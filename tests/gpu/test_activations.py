"""Checkpoints on a real device: the same bits on the host and divided, and memory that shrinks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard
from tests.plan.dry import dry_gpt
from tests.ranks import on_ranks
from zeroshard import Activations
from zeroshard.config.job import ModelConfig
from zeroshard.plan.memory.budget import budget
from zeroshard.plan.model.gpt import from_config
from zeroshard.plan.setup import Setup
from zeroshard.runtime import runtime_of
from zeroshard.train.gpt import GPT
from zeroshard.train.gpt.tensor_parallel import parallelise

CONFIG = ModelConfig(layers=6, hidden=256, heads=4, sequence=128)


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, batch: int) -> list[float]:
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 256, (batch, CONFIG.sequence), generator=generator).cuda()
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(steps: int = 4, **options: Any) -> tuple[list[float], dict[str, Tensor], Any]:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(CONFIG)
    model, optimizer = zeroshard.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), device="cuda:0", stage=2, **options
    )
    losses = losses_of(model, optimizer, steps, batch=8)
    return losses, zeroshard.full_state_dict(model), model


def test_checkpoints_on_the_host_change_no_bit() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain = trained()
        for options in (
            {"activations": Activations()},
            {"activations": Activations(offload=True)},
            {"activations": Activations(offload=True, prefetch=3)},
        ):
            losses, weights, _ = trained(**options)
            assert losses == plain[0], options
            assert all(torch.equal(value, plain[1][name]) for name, value in weights.items()), options
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_waits_on_the_host_is_pinned_and_used_again() -> None:
    _, _, model = trained(steps=2, activations=Activations(offload=True), precision="bf16")
    host = runtime_of(model).checkpoints.store.host
    assert host is not None
    assert len(host.slots) == 6
    assert host.bytes == 6 * 8 * 128 * 256 * 2


def test_the_peak_falls_from_checkpointed_to_divided_to_offloaded() -> None:
    config = ModelConfig(layers=16, hidden=2048, heads=16, sequence=1024)
    peaks = {}
    for name, options in {
        "checkpointed": Activations(),
        "divided": Activations(partition=True),
        "offloaded": Activations(partition=True, offload=True),
    }.items():
        peaks[name] = dry_gpt(config, 32, degree=4, batch=16, real=True, stage=2, activations=options).peak
        setup = Setup(stage=2, world=8, model_parallel=4, batch=16, activations=options)
        assert peaks[name] == pytest.approx(budget(from_config(config), setup).peak.total, rel=0.1), name
    one = 16 * 1024 * 2048 * 2
    assert peaks["checkpointed"] - peaks["divided"] > 8 * one
    assert peaks["divided"] - peaks["offloaded"] > one


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_tensor_parallel_ranks_that_share_a_gpu_train_as_one_does(stage: int) -> None:
    mesh = init_device_mesh("cuda", (1, 2), mesh_dim_names=("d", "m"))
    losses = []
    for degree, options in ((1, {}), (2, {}), (2, {"activations": Activations(partition=True, offload=True)})):
        torch.manual_seed(0)
        with torch.device("meta"):
            model = GPT(CONFIG)
        if degree == 2:
            parallelise(model, mesh["m"])
        model, optimizer = zeroshard.shard(
            model, torch.optim.SGD(model.parameters(), lr=0.1), device="cuda:0", stage=stage, **options
        )
        losses.append(losses_of(model, optimizer, 3, batch=4))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-4)
    # Recomputed and gathered bit for bit; but kernels that add with atomics may differ from run to run.
    torch.testing.assert_close(losses[2], losses[1], rtol=1e-5, atol=1e-6)
    assert dist.is_initialized()


DEEP = ModelConfig(layers=12, hidden=512, heads=8, sequence=512)


def steps_of_deep(options: Activations, steps: int, batch: int = 16, **more: Any) -> tuple[list[float], Any]:
    """Losses, and the model."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(DEEP)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zeroshard.shard(
        model, optimizer, device="cuda:0", stage=2, precision="bf16", activations=options, **more
    )
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 256, (batch, 512), generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("foreseen", [False, True])
def test_auto_keeps_as_many_blocks_as_a_cap_has_room_for(foreseen: bool) -> None:
    """By what the second step measures, or by the plan. It does not run out of memory, and changes no bit."""
    torch.use_deterministic_algorithms(True)  # a warning alone would leave attention free to add in any order
    torch.backends.cuda.enable_cudnn_sdp(False)
    whole = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        expected, model = steps_of_deep(Activations(), 6)
        every = torch.cuda.max_memory_allocated()
        del model
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        _, model = steps_of_deep(Activations(recompute=0.5), 3)
        half = torch.cuda.max_memory_allocated()
        del model
        gc.collect()
        torch.cuda.empty_cache()
        assert half > every
        cap = int((half + (half - every) / 3) / 0.92)
        torch.cuda.set_per_process_memory_fraction(cap / whole)
        tokens = torch.zeros(16, 512, dtype=torch.long, device="meta")
        more = {"example": (tokens, tokens)} if foreseen else {}
        losses, model = steps_of_deep(Activations(recompute="auto"), 6, **more)
        seen = zeroshard.stats(model)
        assert 0 < seen.recomputed_blocks < 12, seen.recompute_reason
        assert losses == expected
        assert torch.cuda.max_memory_allocated() <= cap
        if not foreseen:
            assert 3 <= seen.recomputed_blocks <= 8, seen.recompute_reason
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.use_deterministic_algorithms(False)
