"""Planned memory and volume: the papers' numbers, and the bounds of this runtime."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.plan.gpts import gpt
from zeroshard.config.offload import Offload
from zeroshard.config.options import Activations
from zeroshard.plan.memory.budget import budget
from zeroshard.plan.memory.device_memory import Phase
from zeroshard.plan.memory.rank_memory import RankMemory
from zeroshard.plan.model.model import Model
from zeroshard.plan.papers.formulas import paper_memory, total_bytes
from zeroshard.plan.papers.shape import Transformer
from zeroshard.plan.setup import Setup
from zeroshard.plan.volume import volume

GB = 1e9
GPT2 = gpt(48, 1600, 25, 50257)
PAPERS_GPT2 = Transformer(layers=48, hidden=1600, heads=25, vocabulary=50257, positions=1024)

SIZES = (7_500_000_000, 128_000_000_000, 1_000_000_000_000)
TABLE_1 = {
    1: ("120 120 120", "2048 2048 2048", "16000 16000 16000"),
    4: ("52.5 41.3 30", "896 704 512", "7000 5500 4000"),
    16: ("35.6 21.6 7.5", "608 368 128", "4750 2875 1000"),
    64: ("31.4 16.6 1.88", "536 284 32", "4187 2218 250"),
    256: ("30.4 15.4 0.47", "518 263 8", "4046 2054 62.5"),
    1024: ("30.1 15.1 0.12", "513 257 2", "4011 2013 15.6"),
}
TABLE_2 = {
    1: (2, 7.6, 14.4, 128),
    2: (4, 15.2, 28.8, 256),
    4: (8, 30.4, 57.6, 500),
    8: (16, 60.8, 115.2, 1000),
    16: (32, 121.6, 230.4, 2000),
}
"""By model-parallel degree: billions of parameters on 32 GB with N = 64. Last column in print: 0.5T, 1T, 2T."""


def states(psi: float, stage: int, world: int) -> float:
    return total_bytes(paper_memory(stage, world, "bf16").device, psi)


def made_of(psi: int) -> Model:
    """A model with about this number of parameters, almost all of them in blocks."""
    hidden = round(math.sqrt(psi / 12 / 100) / 128) * 128
    return gpt(round(psi / (12 * hidden**2)), hidden, hidden // 128)


def test_figure_1() -> None:
    assert [round(states(7.5e9, stage, 64) / GB, 1) for stage in range(4)] == [120.0, 31.4, 16.6, 1.9]


@pytest.mark.parametrize("world", TABLE_1)
@pytest.mark.parametrize("size", range(3))
def test_every_cell_of_table_1(world: int, size: int) -> None:
    """The paper truncates large values and rounds small values."""
    for stage, printed in zip((1, 2, 3), TABLE_1[world][size].split(), strict=True):
        digits = len(printed.partition(".")[2])
        value = states(SIZES[size], stage, world) / GB
        truncated = math.floor(value * 10**digits + 1e-9) / 10**digits
        rounded = abs(value - float(printed)) <= 0.5 / 10**digits + 1e-9
        assert rounded or float(printed) == truncated, f"stage {stage}: {value}, printed {printed}"


@pytest.mark.parametrize("degree", TABLE_2)
def test_the_theory_columns_of_table_2(degree: int) -> None:
    for stage, printed in enumerate(TABLE_2[degree]):
        largest = degree * 32 * GB / states(1e9, stage, 64) * 1e9
        assert largest / 1e9 == pytest.approx(printed, rel=0.03)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [4, 64, 1024])
def test_the_plan_of_a_real_shape_agrees_with_the_papers_formula_within_one_percent(stage: int, world: int) -> None:
    model = made_of(7_500_000_000)
    planned = budget(model, Setup(stage=stage, world=world)).at_step.model_states
    assert planned == pytest.approx(states(model.parameters, stage, world), rel=0.01)


def test_offload_leaves_two_bytes_a_parameter_on_the_device_and_fourteen_on_the_host() -> None:
    needs = budget(GPT2, Setup(stage=2, world=1, offload=Offload()))
    assert needs.at_step.model_states / GPT2.parameters == pytest.approx(2, rel=0.01)
    assert needs.host.total / GPT2.parameters == pytest.approx(14, rel=0.01)
    assert needs.host.pinned / GPT2.parameters == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize(
    ("options", "bytes_a_parameter"),
    [
        ({}, 14),
        ({"moments": torch.bfloat16}, 10),
        ({"split_master": True}, 14),
        ({"split_master": True, "read_back": True}, 12),
        ({"delayed_update_after": 40}, 16),
        ({"delayed_update_after": 40, "split_master": True}, 14),
        ({"parameters": "cpu"}, 16),
        ({"update_in_backward": True}, 12),
        ({"host_fraction": 0.5}, 7),
    ],
)
def test_host_bytes_a_parameter_of_every_option(options: dict[str, object], bytes_a_parameter: float) -> None:
    """Without the buffers that units share in turn. Fractions are exact only up to whole units."""
    model = gpt(400, 512, 4)
    stage = 3 if "parameters" in options else 2
    needs = budget(model, Setup(stage=stage, world=2, offload=Offload(**options)))  # type: ignore[arg-type]
    assert 2 * needs.host.total / model.parameters == pytest.approx(bytes_a_parameter, rel=0.02)


# -- activations ------------------------------------------------------------------------------------------------------


def test_the_activations_of_section_3() -> None:
    """1.5B, sequence 1K, batch 32: 60 GB, and about 8 GB with checkpointing. The paper rounds generously."""
    setup = Setup(stage=0, batch=32, sequence=1024, checkpointing=False)
    assert PAPERS_GPT2.paper_activations(setup) / GB == pytest.approx(60, rel=0.01)
    assert 5 < PAPERS_GPT2.paper_activations(replace(setup, checkpointing=True)) / GB < 8


def test_the_slip_of_section_6_counts_one_byte_an_element() -> None:
    """The paper prints 33 GB, and 2 GB if divided among 16. With 2 bytes an element the formula gives twice that."""
    model = Transformer(layers=125, hidden=8192, heads=64, vocabulary=50257, positions=1024)
    setup = Setup(stage=2, model_parallel=16, batch=32, sequence=1024)
    whole, divided = model.paper_activations(setup), model.paper_activations(setup, divided=True)
    assert (round(whole / GB), round(divided / GB, 1)) == (67, 4.2)
    assert (math.floor(whole / 2 / GB), math.floor(divided / 2 / GB)) == (33, 2)


def test_our_own_blocks_save_sixteen_tensors_and_one_with_checkpointing() -> None:
    tensor = 2 * 32 * 1024 * 1600

    def of_one_block(checkpointing: bool) -> int:
        setup = Setup(stage=0, batch=32, checkpointing=checkpointing)
        more, fewer = (gpt(count, 1600, 25).trace(setup).activations for count in (48, 47))
        return more.saved - fewer.saved

    assert of_one_block(checkpointing=False) / tensor == pytest.approx(16, rel=0.02)
    assert of_one_block(checkpointing=True) == tensor


def test_model_parallelism_divides_blocks_and_what_is_inside_them() -> None:
    one, two = (Setup(stage=0, model_parallel=degree, batch=8) for degree in (1, 2))
    model = gpt(48, 1600, 20, 50257)  # two ranks cannot share the 25 heads of GPT-2
    parameters = [budget(model, setup).at_step.parameters for setup in (one, two)]
    assert parameters[1] == pytest.approx(parameters[0] / 2, rel=0.01)
    whole, half = (model.trace(setup).activations for setup in (one, two))
    assert whole.backward[-1] / 2 < half.backward[-1] < whole.backward[-1], "the residual stream stays whole"
    logits = 8 * 1024 * 50257
    assert whole.loss - half.loss == pytest.approx((12 - 6 / 2) * logits, rel=1e-3), "two copies in fp32 less"


# -- phases -----------------------------------------------------------------------------------------------------------


def test_the_phase_of_the_peak_depends_on_the_job() -> None:
    assert budget(GPT2, Setup(stage=2, world=64, batch=8)).phase is Phase.LOSS, "logits of a large vocabulary"
    assert budget(GPT2, Setup(stage=0, batch=1, sequence=128)).phase is Phase.UPDATE, "nothing but the optimizer's"
    small = gpt(48, 1600, 25)
    assert budget(small, Setup(stage=3, world=64, batch=32, checkpointing=False)).phase is Phase.BACKWARD


def test_more_micro_batches_add_accumulators_and_nothing_to_gradients() -> None:
    one, two = (budget(GPT2, Setup(stage=2, world=4, micro_batches=count)) for count in (1, 2))
    assert one.at_step.accumulators == two.at_step.gradients == 0
    assert two.at_step.accumulators == 2 * one.at_step.gradients


def test_stage_3_gathers_the_root_and_two_blocks_and_more_with_prefetch() -> None:
    setup = Setup(stage=3, world=64, batch=4)
    root, block = PAPERS_GPT2.root, PAPERS_GPT2.block
    for ahead in (1, 2, 3):
        gathered = budget(GPT2, replace(setup, prefetch=ahead, checkpointing=False)).peak.gathered
        assert gathered == pytest.approx(2 * (root + (1 + ahead) * block), rel=0.05)


def test_a_block_above_the_limit_is_several_units_of_the_same_size_in_all() -> None:
    whole, split = (GPT2.trace(Setup(stage=3, max_unit_bytes=limit)).units for limit in (1 << 30, 40 << 20))
    assert len(whole) == 49
    assert len(split) > 49
    assert sum(unit.numel(1) for unit in split) == sum(unit.numel(1) for unit in whole)


# -- volume -----------------------------------------------------------------------------------------------------------


def test_volume_is_two_psi_and_in_stage_3_three_psi_less_psi_kept() -> None:
    model = made_of(7_500_000_000)
    in_psi = [volume(model, Setup(stage=stage, world=64)).elements / model.parameters for stage in range(4)]
    assert in_psi[:3] == pytest.approx([2, 2, 2], rel=1e-3)
    assert 2.95 < in_psi[3] < 3


def test_volume_of_several_micro_batches_if_each_is_reduced() -> None:
    model, times = made_of(7_500_000_000), 4
    found = [volume(model, Setup(stage=s, world=64, micro_batches=times, keep=0)).elements for s in range(4)]
    assert [size / model.parameters for size in found] == pytest.approx([8, 5, 5, 12], rel=0.01)


def test_a_world_of_one_communicates_nothing() -> None:
    assert [volume(GPT2, Setup(stage=stage)).elements for stage in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("options", "bytes_a_parameter"),
    [({}, 4), ({"split_master": True, "read_back": True}, 6), ({"parameters": "cpu"}, 6)],
)
def test_traffic_between_host_and_device(options: dict[str, object], bytes_a_parameter: int) -> None:
    model = made_of(7_500_000_000)
    stage = 3 if "parameters" in options else 2
    moved = volume(model, Setup(stage=stage, world=1, offload=Offload(**options), keep=0))  # type: ignore[arg-type]
    assert (moved.to_host + moved.to_device) / model.parameters == pytest.approx(bytes_a_parameter, rel=0.01)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("offload", [None, Offload(), Offload(host_fraction=0.4), Offload(update_in_backward=True)])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_no_peak_is_missed_between_equal_blocks(stage: int, offload: Offload | None, checkpoints: bool) -> None:
    wide = gpt(70, 12800, 100, 50257)
    jobs = ((1, 32, 1, 0), (64, 1, 1, 1), (64, 4, 9, 8))
    for model, (world, batch, prefetch, keep) in product((gpt(70, 1600, 25, 50257), wide), jobs):
        setup = Setup(stage=stage, world=world, batch=batch, offload=offload, prefetch=prefetch, keep=keep)
        if checkpoints:
            setup = replace(setup, activations=Activations(), micro_batches=2)
        ends, every = (RankMemory(setup, model.trace(setup), 0) for _ in range(2))
        every._peak_candidates = list(range(len(every.units)))
        assert len(ends._peak_candidates) < len(every._peak_candidates)
        highest, found = (max(rank.moments(), key=lambda at: sum(at[1].values())) for rank in (every, ends))
        assert found == highest
