"""Plan equals reality, as torch's allocator counts it: the peak of a step within ten percent, states within one."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

import zeroshard
from tests.gpu.test_one_process import fake_world
from zeroshard.config.job import ModelConfig
from zeroshard.config.offload import Offload
from zeroshard.plan.memory.budget import WORKSPACE, budget
from zeroshard.plan.model.gpt import from_config
from zeroshard.plan.setup import Setup
from zeroshard.plan.volume import volume
from zeroshard.train.gpt import GPT

JOBS = {
    "100M, checkpointed": (ModelConfig(layers=12, hidden=768, heads=12, sequence=1024, checkpointing=True), 8),
    "100M, all kept": (ModelConfig(layers=12, hidden=768, heads=12, sequence=512), 8),
    "124M, many tokens": (
        ModelConfig(layers=12, hidden=768, heads=12, sequence=512, vocabulary=50257, checkpointing=True),
        4,
    ),
}
STEPS = 4
"""The first two learn the order of units and make the optimizer's states."""


def measure(config: ModelConfig, batch: int, **options: Any) -> tuple[int, int, Any]:
    """Bytes at the peak of a step and between backward and step, beside what was there before; and the statistics."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with torch.device("meta"):
        model = GPT(config)
    model, optimizer = zeroshard.shard(
        model, torch.optim.AdamW(model.parameters()), init="empty", device="cuda", **options
    )
    tokens = torch.zeros(batch, config.sequence, dtype=torch.long, device="cuda")
    for number in range(STEPS):
        zeroshard.synchronize(model)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(tokens, tokens).backward()
        if number == STEPS - 1:
            break
        optimizer.step()
        optimizer.zero_grad()
        zeroshard.synchronize(model)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    optimizer.clip_grad_norm_(1e9)  # settles reduces under way
    zeroshard.synchronize(model)
    torch.cuda.synchronize()
    at_step = torch.cuda.memory_allocated() - before
    return peak, at_step, zeroshard.stats(model)


def compare(job: str, stage: int, world: int, precision: str, offload: Offload | None) -> None:
    config, batch = JOBS[job]
    # A step that does not wait for the host leaves some of its copies to be counted in the next.
    options = {} if offload is None else {"offload": replace(offload, blocking=True)}
    peak, at_step, counted = measure(config, batch, stage=stage, precision=precision, **options)
    setup = Setup(
        stage=stage,
        world=world,
        offload=offload,
        precision=precision,  # type: ignore[arg-type]
        batch=batch,
        sequence=config.sequence,
        checkpointing=config.checkpointing,
    )
    model = from_config(config)
    needs, moved = budget(model, setup), volume(model, setup)
    assert needs.peak.total == pytest.approx(peak, rel=0.1), f"in {needs.phase.value}: {needs.peak}"
    # Libraries keep what they took: as much as the plan allows for them, at most.
    assert needs.at_step.model_states * 0.99 <= at_step <= needs.at_step.model_states * 1.01 + 1.5 * WORKSPACE
    assert moved.elements == counted.volume_elements
    if offload is not None:
        assert {"to the host": moved.to_host, "to the device": moved.to_device} == dict(counted.host_traffic)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_rank_of_eight_in_every_stage(job: str, stage: int, precision: str) -> None:
    with fake_world(8):
        compare(job, stage, 8, precision, None)


@pytest.mark.parametrize("stage", [0, 2])
def test_one_gpu_alone(stage: int) -> None:
    compare("100M, checkpointed", stage, 1, "bf16", None)


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (1, Offload()),
        (2, Offload()),
        (3, Offload()),
        (2, Offload(moments=torch.bfloat16, split_master=True, read_back=True)),
        (2, Offload(moments="8bit", split_master=True)),
        (3, Offload(parameters="cpu")),
    ],
)
def test_a_rank_of_eight_that_offloads(stage: int, offload: Offload) -> None:
    with fake_world(8):
        compare("100M, checkpointed", stage, 8, "bf16", offload)


@pytest.mark.parametrize("stage", [2, 3])
def test_one_gpu_alone_that_offloads(stage: int) -> None:
    compare("124M, many tokens", stage, 1, "bf16", Offload())
