"""Offload seen from outside: what gives the same bits as what, from the start."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.models import Block, Net, batch, loss_of
from tests.offload.cases import (
    BF16,
    IN_BACKWARD,
    ON_HOST,
    READ_BACK,
    SPLIT,
    STAGES,
    sharded,
    train,
)
from tests.offload.scenarios import (
    SCENARIOS,
    Forked,
    Scenario,
    adamw,
    assert_close_result,
    assert_same_result,
    grouped,
    plain,
    seeded,
    sgd,
    slow_host,
    small,
    stepwise,
)
from tests.ranks import on_ranks
from tests.training import assert_same
from zeroshard import Offload

pytestmark = pytest.mark.usefixtures("one_thread")


SPLIT_CASES = [
    "clipping in bf16",
    "micro-batches and clipping in bf16",
    "groups in bf16 with a schedule",
    "frozen parameters",
    "a moving average in bf16",
    "parameters that some ranks use",
    "dropped gradients in bf16 with clipping",
    "delayed reduction",
]


@pytest.mark.parametrize("name", SPLIT_CASES)
def test_a_split_master_read_back_or_not_is_bit_for_bit_an_fp32_one(name: str) -> None:
    scenario = SCENARIOS[name]
    expected = scenario.run(2, Offload())
    with slow_host(0.001):
        for stage, options in ((0, SPLIT), (3, SPLIT), (1, READ_BACK), (3, READ_BACK)):
            assert_same_result(scenario.run(stage, options), expected, f"stage {stage}, {options}")


@on_ranks(2)
def test_a_split_master_read_back_or_not_is_bit_for_bit_an_fp32_one_on_two_ranks() -> None:
    scenario = SCENARIOS["micro-batches and clipping in bf16"]
    expected = scenario.run(2, Offload())
    with slow_host(0.001):
        for stage, options in ((0, SPLIT), (3, READ_BACK), (1, READ_BACK)):
            assert_same_result(scenario.run(stage, options), expected, f"stage {stage}, {options}")


SMALL_MOMENTS: tuple[Any, ...] = (torch.bfloat16, "8bit")
EARLY_CASES = [
    "plain",
    "groups in bf16 with a schedule",
    "adam",
    "sgd without moments",
    "frozen parameters",
    "a moving average",
    "unused parameters",
    "a changing order",
    "recomputation",
    "reentrant recomputation",
    "closures",
    "looks at everything",
    "evaluation",
]


def compare_updates_in_backward(name: str, stages: tuple[int, ...]) -> None:
    scenario = SCENARIOS[name]
    scenario = replace(scenario, options={k: v for k, v in scenario.options.items() if k != "clip_grad_norm"})
    expected = scenario.run(2, Offload())
    with slow_host(0.001):
        for stage in stages:
            assert_same_result(scenario.run(stage, IN_BACKWARD), expected, f"{name}, stage {stage}")
        if scenario.options == BF16:
            for moments in SMALL_MOMENTS:
                slim = Offload(moments=moments, split_master=True)
                expected = scenario.run(1, slim)
                for each in (
                    replace(slim, update_in_backward=True),
                    replace(slim, update_in_backward=True, read_back=True),
                ):
                    assert_same_result(scenario.run(3, each), expected, f"{name}, {each}")


@pytest.mark.parametrize("name", EARLY_CASES)
def test_updates_in_backward_are_bit_for_bit_those_of_the_step(name: str) -> None:
    compare_updates_in_backward(name, (0, 3))


@on_ranks(2)
def test_updates_in_backward_are_bit_for_bit_those_of_the_step_on_two_ranks() -> None:
    for name in ("groups in bf16 with a schedule", "unused parameters", "reentrant recomputation"):
        compare_updates_in_backward(name, (1, 3))


class Partly(nn.Module):
    """Rank 1 leaves out a layer of one block, another one every step."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.extra = Block(9), nn.Linear(9, 9)

        def forward(self, x: Tensor, whole: bool) -> Tensor:
            return self.extra(self.block(x)) if whole else self.block(x)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.parts = nn.ModuleList(self.Part() for _ in range(4))

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.first(x)
        for number, part in enumerate(self.parts):
            x = part(x, not (dist.get_rank() == 1 and number == (step + 1) % 4))
        return x


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_updates_in_backward_stay_together_where_one_rank_leaves_a_parameter_out(stage: int) -> None:
    scenario = Scenario(stepwise, build=partial(seeded, Partly), options={"stall_timeout": 15.0})
    assert_same_result(scenario.run(stage, IN_BACKWARD), scenario.run(stage, Offload()), f"stage {stage}")


class Twice(nn.Module):
    """A block that is called first and last, and uses one layer more the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.parts = nn.ModuleList(Partly.Part() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts[0](self.first(x), False)
        for part in (*self.parts[1:], self.parts[0]):
            x = part(x, True)
        return x


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_updates_in_backward_wait_for_a_block_that_is_called_twice(stage: int) -> None:
    scenario = Scenario(build=partial(seeded, Twice))
    assert_same_result(scenario.run(stage, IN_BACKWARD), scenario.run(stage, Offload()), f"stage {stage}")


RESTING: list[tuple[str, Offload]] = [
    ("clipping", ON_HOST),
    ("clipping in bf16", ON_HOST),
    ("micro-batches and clipping in bf16", replace(ON_HOST, split_master=True)),
    ("frozen parameters", replace(ON_HOST, moments=torch.bfloat16, split_master=True)),
    ("plain in bf16", replace(ON_HOST, update_in_backward=True)),
    ("plain in bf16", replace(ON_HOST, delayed_update_after=1)),
    ("clipping in bf16", replace(ON_HOST, moments="8bit", delayed_update_after=1)),
    ("plain", replace(ON_HOST, delayed_update_after=1)),
    ("a changing order", ON_HOST),
    ("a moving average in bf16", ON_HOST),
    ("fp16 with skipped steps", ON_HOST),
]


def compare_resting_places(cases: list[tuple[str, Offload]]) -> None:
    for name, options in cases:
        scenario = SCENARIOS[name]
        expected = scenario.run(3, replace(options, parameters="device"))
        assert_same_result(scenario.run(3, options), expected, f"{name}: {options}")
    assert_same_result(scenario.run(3, options, keep=(), prefetch=0), expected, "nothing ahead")


def test_parameters_that_rest_on_the_host_are_bit_for_bit_those_on_the_device() -> None:
    compare_resting_places(RESTING)


@on_ranks(2)
def test_parameters_that_rest_on_the_host_are_bit_for_bit_those_on_the_device_on_two_ranks() -> None:
    with slow_host():
        compare_resting_places([RESTING[2], RESTING[7]])


def test_a_frozen_model_may_rest_on_the_host_without_an_optimizer() -> None:
    model = small().requires_grad_(False)
    expected = model(batch(0))
    model, _ = zeroshard.shard(model, stage=3, offload=ON_HOST)
    assert zeroshard.stats(model).memory.parameters == 0
    for _ in range(2):
        assert torch.equal(model(batch(0)), expected)
    assert_same(zeroshard.full_state_dict(model), dict(small().state_dict()))


@pytest.mark.parametrize("moments", SMALL_MOMENTS, ids=str)
@on_ranks(2)
def test_small_moments_give_the_same_bits_in_every_stage_and_with_every_overlap(moments: Any) -> None:
    scenario = SCENARIOS["micro-batches and clipping in bf16"]
    options = Offload(moments=moments)
    expected = scenario.run(2, replace(options, blocking=True))
    assert all(v.dtype is torch.bfloat16 for name, v in expected.states.items() if "exp_avg" in name)
    with slow_host():
        for stage in (0, 3):
            assert_same_result(scenario.run(stage, options), expected, f"stage {stage}")
    split = replace(options, split_master=True, read_back=True)
    assert_same_result(scenario.run(1, split), expected, "split master, read back")


@pytest.mark.parametrize("name", ["adam", "momentum", "sgd without moments", "groups in bf16 with a schedule"])
def test_8_bit_moments_give_the_same_bits_with_every_optimizer_and_however_units_are_divided(name: str) -> None:
    scenario, options = SCENARIOS[name], Offload(moments="8bit", seed=3)
    expected = scenario.run(2, replace(options, blocking=True))
    with slow_host():
        for stage in (1, 3):
            assert_same_result(scenario.run(stage, options, max_unit_bytes=400), expected, f"stage {stage}")


@pytest.mark.parametrize("moments", SMALL_MOMENTS, ids=str)
def test_small_moments_on_the_host_and_fp32_moments_on_the_device(moments: Any) -> None:
    scenario = SCENARIOS["clipping in bf16"]
    half = Offload(moments=moments, host_fraction=0.5)
    result = scenario.run(2, half)
    assert_same_result(scenario.run(3, half), result, "stage 3")
    dtypes = {value.dtype for name, value in result.states.items() if "exp_avg" in name}
    assert dtypes == {torch.bfloat16, torch.float32}


def test_a_moment_in_8_bits_is_right_while_the_host_updates() -> None:
    model, optimizer = SCENARIOS["plain in bf16"].begin(2, Offload(moments="8bit"))
    with slow_host(0.05):
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [dict(state) for state in optimizer.state.values()]
        read = [state["exp_avg"] * 1 for state in states]
    zeroshard.synchronize(model)
    assert all(moment.any() for moment in read)
    for moment, state in zip(read, states, strict=True):
        assert torch.equal(moment, state["exp_avg"])


def test_any_share_of_the_states_may_live_on_the_host() -> None:
    auto = Offload(host_fraction="auto", device_memory=20_000)
    names = ("clipping", "dropped gradients", "micro-batches", "unused parameters", "clipping by hand", "evaluation")
    for name in names:
        scenario = SCENARIOS[name]
        expected = scenario.run(2)
        for stage, each in ((0, 0.5), (2, 0.0), (3, 0.5), (1, 1), (2, auto)):
            offload = each if isinstance(each, Offload) else Offload(host_fraction=each)
            assert_close_result(scenario.run(stage, offload), expected, f"{name}, stage {stage}: {each}")


@on_ranks(2)
def test_a_share_of_the_states_on_the_host_gives_the_same_bits_late_or_not_in_every_stage() -> None:
    half, scenario = Offload(host_fraction=0.5), SCENARIOS["clipping"]
    expected = scenario.run(1, replace(half, blocking=True))
    assert_close_result(expected, scenario.run(2), "without offload")
    with slow_host():
        for stage in (0, 3):
            assert_same_result(scenario.run(stage, half), expected, f"stage {stage}")


@on_ranks(2)
def test_the_first_units_states_stay_on_the_device_as_far_as_fraction_or_memory_go() -> None:
    units = zeroshard.stats(sharded(None, stage=2)[0]).padded_parameters
    for offload, least, most in (
        (Offload(host_fraction=1), 1, 1),
        (Offload(host_fraction=0.5), 0.5, 0.75),
        (Offload(host_fraction=0.1), 0.1, 0.4),
        (Offload(host_fraction="auto", device_memory=1), 1, 1),
        (Offload(host_fraction="auto", device_memory=1 << 40), 0, 0),
        (Offload(host_fraction="auto", device_memory=2 * units + 7 * units // 2), 0.4, 0.8),
    ):
        model, optimizer = sharded(offload, stage=2, **BF16)
        plain(model, optimizer)
        zeroshard.synchronize(model)
        stats = zeroshard.stats(model)
        host = 0 if stats.host_memory is None else stats.host_memory.total
        share = host / (14 * stats.padded_parameters / 2)
        assert least <= share <= most, f"{offload}: {share}"
        rest = (1 - share) * 12 * stats.padded_parameters / 2
        assert 0.6 * rest <= stats.memory.optimizer_states <= rest, "torch's moments have no padding"
        if offload.device_memory is not None and 1 < offload.device_memory < 1 << 40:
            assert stats.memory_at_step is not None
            assert stats.memory_at_step.model_states <= offload.device_memory


def whole_batch(step: int) -> Tensor:
    return torch.randn(8, 7, generator=torch.Generator().manual_seed(step))


def on_a_part_of_each_batch(steps: int, **options: Any) -> dict[str, Tensor]:
    world, rank = dist.get_world_size(), dist.get_rank()
    model, optimizer = sharded(**options)
    for step in range(steps):
        for rows in whole_batch(step).chunk(2):
            (model(rows.chunk(world)[rank]).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zeroshard.full_state_dict(model)


def compare_with_plain_torch(stages: tuple[int, ...] = STAGES) -> None:
    reference = small()
    optimizer = adamw(reference)
    for step in range(4):
        reference(whole_batch(step)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.02)
        optimizer.step()
        optimizer.zero_grad()
    for stage in stages:
        ours = on_a_part_of_each_batch(4, stage=stage, clip_grad_norm=0.02)
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(ours[name], value, rtol=2e-5, atol=2e-6)


@on_ranks(1)
def test_one_rank_trains_as_plain_torch_within_rounding() -> None:
    compare_with_plain_torch()


@on_ranks(2)
def test_two_ranks_train_as_plain_torch_within_rounding() -> None:
    compare_with_plain_torch()


@pytest.mark.slow
@on_ranks(4)
def test_four_ranks_train_as_plain_torch_within_rounding_and_as_when_blocking() -> None:
    compare_with_plain_torch((1, 3))
    expected = SCENARIOS["clipping in bf16"].run(1, Offload(blocking=True))
    for stage, offload in ((2, Offload()), (3, SPLIT), (3, ON_HOST)):
        assert_same_result(SCENARIOS["clipping in bf16"].run(stage, offload), expected, f"stage {stage}: {offload}")


def test_one_step_is_within_a_few_ulps_of_the_device_optimizer() -> None:
    """The kernel's own tests state two ulps for an update; here the same gradients go through all of the pipeline."""
    for make in (adamw, grouped, sgd):
        results = []
        for offload in (None, "cpu"):
            model, optimizer = sharded(offload, make, stage=2)
            train(model, optimizer, range(1))
            results.append(zeroshard.full_state_dict(model))
        for name, start in small().state_dict().items():
            device, host = results[0][name], results[1][name]
            ulp = torch.finfo(torch.float32).eps * torch.maximum(start.abs(), device.abs()).clamp_min(1e-2)
            assert bool(((host - device).abs() <= 2 * ulp).all()), f"{make.__name__} {name}"


@on_ranks(2)
def test_two_models_train_at_once_as_they_do_alone() -> None:
    alone = [SCENARIOS[name].run(stage, Offload()) for name, stage in (("plain", 2), ("clipping in bf16", 3))]
    first = sharded(stage=2)
    second = sharded(stage=3, clip_grad_norm=0.02, **BF16)
    with slow_host():
        for step in range(4):
            losses = [loss_of(model, step) for model, _ in (first, second)]
            for loss in losses:
                loss.backward()
            for _, optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
    for (model, _), expected in zip((first, second), alone, strict=True):
        assert_same(zeroshard.full_state_dict(model), expected.weights)


def test_a_16_bit_parameter_without_a_gradient_stays_what_it_is() -> None:
    for offload in (Offload(), SPLIT, READ_BACK, ON_HOST, IN_BACKWARD, Offload(delayed_update_after=0)):
        for precision in ("bf16",) if offload.split_master or offload.update_in_backward else ("bf16", "fp16"):
            model = seeded(partial(Forked, False))
            model, optimizer = zeroshard.shard(model, adamw(model), stage=3, offload=offload, precision=precision)
            start = zeroshard.full_state_dict(model)
            for step in range(3):
                model(batch(step), 0).float().square().mean().backward()
                if not offload.update_in_backward:
                    model.first.bias.grad = None
                optimizer.step()
                optimizer.zero_grad()
            zeroshard.synchronize(model)
            after = zeroshard.full_state_dict(model)
            names = ["never.weight", "never.bias", "forks.0.right.up.weight", "forks.1.left.norm.weight"]
            for name in names if offload.update_in_backward else [*names, "first.bias"]:
                assert torch.equal(after[name], start[name]), f"{name} with {offload} in {precision}"
            assert not torch.equal(after["first.weight"], start["first.weight"])


@on_ranks(2)
def test_a_model_on_the_meta_device_begins_with_the_same_parameters_as_without_offload() -> None:
    def begun(stage: int, offload: Offload | None, **options: Any) -> tuple[Any, Any]:
        with torch.device("meta"):
            model = Net(width=9, depth=3)
        torch.manual_seed(5)
        return zeroshard.shard(model, adamw(model), stage=stage, offload=offload, **options)

    for options in ({}, BF16):
        expected = zeroshard.full_state_dict(begun(2, None, **options)[0])
        for stage, offload in ((1, Offload()), (3, ON_HOST)):
            model, optimizer = begun(stage, offload, **options)
            assert_same(zeroshard.full_state_dict(model), expected)
            train(model, optimizer, range(1))


@on_ranks(2)
def test_weights_from_a_file_are_the_same_with_and_without_offload() -> None:
    from safetensors.torch import save_file

    source = small()
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    file = Path(folders[0]) / "model.safetensors"
    if dist.get_rank() == 0:
        save_file(dict(source.state_dict()), file)
    dist.barrier()
    for stage, offload in ((0, Offload()), (3, Offload()), (3, ON_HOST)):
        with torch.device("meta"):
            model = Net(width=9, depth=3)
        model, optimizer = zeroshard.shard(model, adamw(model), stage=stage, offload=offload, weights=file)
        assert_same(zeroshard.full_state_dict(model), dict(source.state_dict()))
        train(model, optimizer, range(1))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])
