"""A run matches its plan: states by live storages, volume and traffic by the counters, peaks by shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.matrix import matrix
from tests.models import loss_of, net
from tests.ranks import on_ranks
from tests.storages import live_storages
from zeroshard.config.job import ModelConfig
from zeroshard.config.offload import Offload
from zeroshard.plan.dryrun import dry_run
from zeroshard.plan.memory.budget import WORKSPACE, budget
from zeroshard.plan.model.gpt import from_config
from zeroshard.plan.model.trace import ActivationBytes, Trace
from zeroshard.plan.model.units import module_units
from zeroshard.plan.setup import Setup
from zeroshard.plan.volume import volume
from zeroshard.train.gpt import GPT

SMALL = ModelConfig(layers=3, hidden=128, heads=2, sequence=32, vocabulary=256)
DEEP = ModelConfig(layers=6, hidden=64, heads=1, sequence=16, vocabulary=300, tied=False)
BF16 = torch.bfloat16
STEPS = 6
"""Enough steps for a delayed update to become regular, which takes longest."""


def train(config: ModelConfig, micro_batches: int = 1, **options: Any) -> tuple[int, Any]:
    """Trains. Returns the bytes of model states between the last backward and its step, and the counters before it."""
    before = live_storages()
    torch.manual_seed(0)
    model = GPT(config)
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), **options)
    tokens = torch.randint(256, (2, config.sequence))
    for number in range(STEPS):
        for _ in range(micro_batches):
            model(tokens, tokens).backward()
        if number == STEPS - 1:
            break
        optimizer.step()
        optimizer.zero_grad()
    counted = zeroshard.stats(model)
    if not (isinstance(options.get("offload"), Offload) and options["offload"].update_in_backward):
        optimizer.clip_grad_norm_(1e9)  # waits for all reduces
    zeroshard.synchronize(model)
    after = live_storages()
    present = sum(size for pointer, size in after.items() if pointer not in before) - tokens.nbytes
    optimizer.step()
    zeroshard.synchronize(model)
    return present, counted


MODELS = {"small": SMALL, "deep": DEEP}
OFFLOADS: list[tuple[int, str, Offload]] = [
    (0, "bf16", Offload()),
    (1, "bf16", Offload()),
    (2, "bf16", Offload()),
    (3, "bf16", Offload()),
    (2, "fp32", Offload()),
    (2, "bf16", Offload(moments=BF16)),
    (2, "bf16", Offload(split_master=True)),
    (3, "bf16", Offload(moments="8bit")),
    (3, "bf16", Offload(split_master=True, read_back=True, moments=BF16)),
    (2, "bf16", Offload(host_fraction=0.5)),
    (2, "bf16", Offload(delayed_update_after=1)),
    (3, "bf16", Offload(parameters="cpu")),
    (3, "bf16", Offload(parameters="cpu", split_master=True)),
    (3, "fp32", Offload(parameters="cpu")),
]


@matrix(model=MODELS, stage=range(4), precision=("bf16", "fp32"))
@on_ranks(2)
def test_states_and_volume_of_every_stage(model: str, stage: int, precision: str) -> None:
    config = MODELS[model]
    present, counted = train(config, stage=stage, precision=precision)
    setup = Setup(stage=stage, world=2, precision=precision, sequence=config.sequence, checkpointing=False)  # type: ignore[arg-type]
    planned = from_config(config)
    assert budget(planned, setup).at_step.model_states == pytest.approx(present, rel=0.01)
    assert volume(planned, setup).elements == counted.volume_elements
    assert {name: traffic.elements for name, traffic in counted.volume.items()} == {
        name: size for name, size in _by_collective(planned, setup).items() if size
    }


def _by_collective(model: Any, setup: Setup) -> dict[str, int]:
    moved = volume(model, setup)
    return {"all_gather": moved.all_gather, "reduce_scatter": moved.reduce_scatter, "all_reduce": moved.all_reduce}


@pytest.mark.parametrize("case", range(len(OFFLOADS)))
@on_ranks(2)
def test_states_volume_and_traffic_of_every_offload(case: int) -> None:
    """On a CPU, the host's buffers are storages like the device's; the two places are told apart by the plan alone.

    A step that does not wait for the host leaves some of its copies to be counted in the next, so these steps wait.
    """
    stage, precision, offload = OFFLOADS[case]
    offload = replace(offload, blocking=True)
    present, counted = train(SMALL, stage=stage, precision=precision, offload=offload)
    setup = Setup(stage=stage, world=2, precision=precision, offload=offload, sequence=32, checkpointing=False)  # type: ignore[arg-type]
    model = from_config(SMALL)
    needs, moved = budget(model, setup), volume(model, setup)
    assert needs.at_step.model_states + needs.host.total == pytest.approx(present, rel=0.01)
    assert moved.elements == counted.volume_elements
    assert {"to the host": moved.to_host, "to the device": moved.to_device} == dict(counted.host_traffic)


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_states_and_volume_of_several_micro_batches(stage: int) -> None:
    present, counted = train(SMALL, micro_batches=2, stage=stage, precision="bf16")
    setup = Setup(stage=stage, world=2, micro_batches=2, sequence=32, checkpointing=False)
    needs = budget(from_config(SMALL), setup).at_step
    assert needs.model_states + needs.accumulators == pytest.approx(present, rel=0.01)
    assert volume(from_config(SMALL), setup).elements == counted.volume_elements


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_volume_of_any_module_with_frozen_parameters_and_sizes_that_divide_nothing(stage: int) -> None:
    model = net(depth=3)
    model.blocks[1].requires_grad_(False)
    units = module_units(model, 2, 1 << 30)
    traced = Trace(units, 0, ActivationBytes.none(len(units)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(trained), stage=stage, precision="bf16")
    for number in range(3):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert volume(traced, Setup(stage=stage, world=2)).elements == zeroshard.stats(model).volume_elements


# -- peaks, from shapes alone -----------------------------------------------------------------------------------------

PEAKS = {
    "checkpointed": (ModelConfig(layers=4, hidden=256, heads=4, sequence=128, checkpointing=True), 8, 1 << 30),
    "all saved": (ModelConfig(layers=4, hidden=256, heads=4, sequence=128), 8, 1 << 30),
    "many tokens": (ModelConfig(layers=3, hidden=256, heads=4, sequence=128, vocabulary=9000), 8, 1 << 30),
    "small batch": (ModelConfig(layers=4, hidden=512, heads=4, sequence=64, checkpointing=True), 1, 1 << 30),
    "units split": (ModelConfig(layers=4, hidden=512, heads=4, sequence=64, checkpointing=True), 4, 3 << 20),
    "own head": (ModelConfig(layers=4, hidden=256, heads=4, sequence=64, vocabulary=9000, tied=False), 1, 1 << 30),
}


@matrix(job=PEAKS, stage=range(4))
def test_the_peak_is_that_of_a_run_without_values_within_ten_percent(job: str, stage: int) -> None:
    """All storages of one rank of eight, seen by every operation. A GPU adds the memory of its libraries."""
    config, batch, limit = PEAKS[job]
    tokens = (batch, config.sequence)

    def loss(model: nn.Module) -> Tensor:
        result: Tensor = model(torch.zeros(tokens, dtype=torch.long), torch.zeros(tokens, dtype=torch.long))
        return result

    seen = dry_run(
        lambda: GPT(config),
        lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
        loss,
        world=8,
        real=False,
        stage=stage,
        precision="bf16",
        max_unit_bytes=limit,
    )
    setup = Setup(
        stage=stage,
        world=8,
        batch=batch,
        sequence=config.sequence,
        checkpointing=config.checkpointing,
        max_unit_bytes=limit,
    )
    needs = budget(from_config(config), setup)
    assert needs.peak.total - WORKSPACE == pytest.approx(seen.peak, rel=0.1), needs.phase
    assert needs.at_step.model_states == pytest.approx(seen.at_step.model_states, rel=0.01)
    assert volume(from_config(config), setup).elements == seen.volume_elements


@matrix(job=("small batch", "units split"), prefetch=(None, 0, 1, 3))
def test_units_gathered_ahead_are_in_the_peak_and_between_steps_as_planned(job: str, prefetch: int | None) -> None:
    config, batch, limit = PEAKS[job]
    tokens = torch.zeros(batch, config.sequence, dtype=torch.long)
    options = {} if prefetch is None else {"prefetch": prefetch}
    seen = dry_run(
        lambda: GPT(config),
        lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
        lambda model: model(torch.zeros_like(tokens), torch.zeros_like(tokens)),
        world=8,
        real=False,
        stage=3,
        precision="bf16",
        max_unit_bytes=limit,
        **options,
    )
    setup = Setup(stage=3, world=8, batch=batch, sequence=config.sequence, max_unit_bytes=limit, **options)
    needs = budget(from_config(config), setup, workspace=0)
    assert needs.peak.total == pytest.approx(seen.peak, rel=0.025), needs.phase
    assert needs.at_rest.total == pytest.approx(seen.at_rest, rel=0.01)
