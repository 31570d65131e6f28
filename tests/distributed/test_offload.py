"""Offload seen from outside: what agrees with what, what may be looked at when, and what it costs."""

from __future__ import annotations

import copy
import gc
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.models import Block, Net, batch, loss_of, net
from tests.offload.scenarios import (
    SCENARIOS,
    Forked,
    Result,
    Scenario,
    adamw,
    assert_close_result,
    assert_same_result,
    grouped,
    one_thread,
    plain,
    seeded,
    sgd,
    slow_host,
    small,
    stepwise,
)
from tests.ranks import on_ranks
from tests.training import assert_close, assert_same, refused
from zeroshard import Offload, OffloadError, StallError, machine
from zeroshard.offload import pipeline

STAGES = (0, 1, 2, 3)
SPLIT = Offload(split_master=True)
READ_BACK = Offload(split_master=True, read_back=True)
IN_BACKWARD = Offload(update_in_backward=True)
BF16 = {"precision": "bf16"}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with one_thread():
        yield


def sharded(offload: Offload | str | None = "cpu", make: Any = adamw, **options: Any) -> tuple[Any, Any]:
    model = small()
    return zeroshard.shard(model, make(model), offload=offload, **options)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def masters(optimizer: Any) -> dict[str, Tensor]:
    return {str(number): state["master"] for number, state in sorted(optimizer.state_dict()["state"].items())}


# -- what gives the same bits ----------------------------------------------------------------------------------------


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
            slim = Offload(moments=torch.bfloat16, split_master=True)
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


ON_HOST = Offload(parameters="cpu")
RESTING: list[tuple[str, Offload]] = [
    ("clipping", ON_HOST),
    ("clipping in bf16", ON_HOST),
    ("micro-batches and clipping in bf16", replace(ON_HOST, split_master=True)),
    ("frozen parameters", replace(ON_HOST, moments=torch.bfloat16, split_master=True)),
    ("plain in bf16", replace(ON_HOST, update_in_backward=True)),
    ("plain in bf16", replace(ON_HOST, delayed_update_after=1)),
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


@on_ranks(2)
def test_16_bit_moments_give_the_same_bits_in_every_stage_and_with_every_overlap() -> None:
    scenario = SCENARIOS["micro-batches and clipping in bf16"]
    options = Offload(moments=torch.bfloat16)
    expected = scenario.run(2, replace(options, blocking=True))
    assert all(v.dtype is torch.bfloat16 for name, v in expected.states.items() if "exp_avg" in name)
    with slow_host():
        for stage in (0, 3):
            assert_same_result(scenario.run(stage, options), expected, f"stage {stage}")


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


# -- delayed update --------------------------------------------------------------------------------------------------


def delayed_by_hand(
    after: int, steps: int, clip: float | None = None, gamma: float = 1.0, micro: int = 1
) -> list[dict[str, Tensor]]:
    """The parameters that each step's forward ran on, and those after the last update, with plain torch.

    PAPERS section 6: the gradient of step i+1 is computed with the parameters after update i-1.
    """
    model, masters = small(), small()
    optimizer = adamw(masters)
    seen = []
    for step in range(1, steps + 1):
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        for number in range(micro):
            loss_of(model, 10 * step + number).backward()
        before = {name: value.clone() for name, value in masters.state_dict().items()}
        for parameter, master in zip(model.parameters(), masters.parameters(), strict=True):
            if dist.is_initialized():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            master.grad = parameter.grad
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(masters.parameters(), clip)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= gamma
        model.load_state_dict(before if step > after else masters.state_dict())
        model.zero_grad()
    return [*seen, dict(masters.state_dict())]


def compare_with_delayed_by_hand(
    stage: int, after: int, offload: Offload, clip: float | None = None, gamma: float = 1.0, micro: int = 1
) -> None:
    expected = delayed_by_hand(after, 5, clip, gamma, micro)
    model, optimizer = sharded(replace(offload, delayed_update_after=after), stage=stage, clip_grad_norm=clip)
    for step in range(1, 6):
        assert_close(zeroshard.full_state_dict(model), expected[step - 1])
        for number in range(micro):
            loss_of(model, 10 * step + number).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= gamma
        optimizer.zero_grad()
    zeroshard.synchronize(model)
    assert_close(zeroshard.full_state_dict(model), expected[-1])


@on_ranks(2)
def test_a_delayed_step_runs_on_the_parameters_of_the_last_but_one_update() -> None:
    with slow_host():
        for stage in (0, 2, 3):
            compare_with_delayed_by_hand(stage, after=2, offload=Offload())


@on_ranks(2)
def test_clipping_and_learning_rate_of_a_delayed_update_are_those_of_its_own_gradients() -> None:
    with slow_host():
        for stage, offload in ((0, Offload()), (3, Offload()), (3, ON_HOST)):
            compare_with_delayed_by_hand(stage, after=0, offload=offload, clip=0.02, gamma=0.3)


def test_all_micro_batches_of_a_delayed_step_run_on_one_version_of_the_parameters() -> None:
    compare_with_delayed_by_hand(2, after=1, offload=Offload(), micro=2)


def test_micro_batches_of_a_delayed_step_that_are_reduced_together_run_on_one_version_of_the_parameters() -> None:
    expected = delayed_by_hand(1, 5, micro=2)
    model, optimizer = sharded(Offload(delayed_update_after=1), stage=2)
    for step in range(1, 6):
        with zeroshard.no_sync(model):
            loss_of(model, 10 * step).backward()
        loss_of(model, 10 * step + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    zeroshard.synchronize(model)
    assert_close(zeroshard.full_state_dict(model), expected[-1])


def test_before_its_first_delay_the_update_is_bit_for_bit_the_plain_one() -> None:
    for name in ("clipping in bf16", "plain"):
        expected = SCENARIOS[name].run(2, Offload())
        assert_same_result(SCENARIOS[name].run(2, Offload(delayed_update_after=4)), expected, name)


DELAYED = Offload(delayed_update_after=1)


DELAYED_CASES = [
    "groups in bf16 with a schedule",
    "fp16 with skipped steps",
    "micro-batches and clipping in bf16",
    "unused parameters",
    "frozen parameters",
    "a changing order",
    "evaluation",
    "looks at everything",
    "reentrant recomputation",
    "dropped gradients",
    "a failed backward",
    "a moving average in bf16",
    "clipping by hand",
]


def compare_delayed_updates(name: str, stages: tuple[int, ...]) -> None:
    def settled(model: Any, optimizer: Any) -> None:
        SCENARIOS[name].train(model, optimizer)
        zeroshard.synchronize(model)

    scenario = replace(SCENARIOS[name], train=settled)
    expected = scenario.run(2, replace(DELAYED, blocking=True))
    with slow_host():
        for stage in stages:
            assert_same_result(scenario.run(stage, DELAYED), expected, f"{name}, stage {stage}")
        if "in bf16" in name:
            assert_same_result(scenario.run(3, replace(DELAYED, split_master=True)), expected, "split master")


@pytest.mark.parametrize("name", DELAYED_CASES)
def test_a_delayed_update_gives_the_bits_of_a_blocking_one(name: str) -> None:
    compare_delayed_updates(name, (0, 3))


@on_ranks(2)
def test_a_delayed_update_gives_the_bits_of_a_blocking_one_in_every_stage_on_two_ranks() -> None:
    for name in ("fp16 with skipped steps", "a changing order"):
        compare_delayed_updates(name, (0, 1, 3))


@on_ranks(2)
def test_synchronize_publishes_a_delayed_update_and_the_next_step_runs_on_it() -> None:
    expected = SCENARIOS["plain"].run(2, Offload())
    for stage in (1, 3):
        model, optimizer = sharded(Offload(delayed_update_after=0), stage=stage)
        for step in range(4):
            train(model, optimizer, range(step, step + 1))
            before = zeroshard.full_state_dict(model)
            zeroshard.synchronize(model)
            after = zeroshard.full_state_dict(model)
            assert any(not torch.equal(before[name], after[name]) for name in after)
        assert_same(after, expected.weights)


# -- quality ---------------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Predicts the next token of a Markov chain."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.head = nn.Linear(16, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def validation_loss(seed: int, offload: Offload, steps: int = 110) -> float:
    generator = torch.Generator().manual_seed(seed)
    chances = torch.randn(24, 24, generator=generator).mul(1.5).softmax(-1)

    def tokens(count: int) -> tuple[Tensor, Tensor]:
        now = torch.randint(0, 24, (count,), generator=generator)
        return now, torch.multinomial(chances[now], 1, generator=generator).squeeze(1)

    torch.manual_seed(seed)
    model = Chain()
    made = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.999), weight_decay=0.01)
    model, optimizer = zeroshard.shard(model, made, stage=2, precision="bf16", offload=offload, clip_grad_norm=1.0)
    for _ in range(steps):
        x, y = tokens(128)
        nn.functional.cross_entropy(model(x).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    zeroshard.synchronize(model)
    x, y = tokens(4096)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x).float(), y))


def test_16_bit_moments_and_delayed_updates_reach_the_validation_loss_of_the_plain_step_within_one_percent() -> None:
    for seed in (0, 1, 2):
        expected = validation_loss(seed, Offload())
        assert expected < 0.9 * torch.tensor(24.0).log(), "it has learnt something"
        for offload in (Offload(moments=torch.bfloat16, split_master=True), Offload(delayed_update_after=40)):
            assert validation_loss(seed, offload) == pytest.approx(expected, rel=0.01), f"seed {seed}: {offload}"


# -- what may be looked at, and when ---------------------------------------------------------------------------------


@on_ranks(2)
def test_everything_is_right_directly_after_step() -> None:
    expected = SCENARIOS["plain in bf16"].run(2, Offload(blocking=True))
    looks = ("full_state_dict", "gathered", "one parameter", "state_dict", "optimizer.state", "synchronize")
    with slow_host(0.005):
        for stage in (1, 3):
            for look in looks:
                model, optimizer = sharded(stage=stage, **BF16)
                train(model, optimizer, range(3))
                loss_of(model, 3).backward()
                optimizer.step()
                if look == "full_state_dict":
                    assert_same(zeroshard.full_state_dict(model), expected.weights)
                elif look == "gathered":
                    with zeroshard.gathered(model):
                        assert_same(dict(model.state_dict()), expected.weights)
                elif look == "one parameter":
                    with zeroshard.gathered(model.blocks[2].up.weight):
                        assert torch.equal(model.blocks[2].up.weight, expected.weights["blocks.2.up.weight"])
                elif look == "optimizer.state":
                    steps = [float(state["step"]) for state in optimizer.state.values()]
                    assert steps
                    assert set(steps) == {4.0}
                    squares = sum(float(s["exp_avg_sq"].double().sum()) for s in optimizer.state.values())
                    if stage:
                        total = torch.tensor(squares)
                        dist.all_reduce(total)
                        squares = float(total)
                    known = sum(float(v.double().sum()) for k, v in expected.states.items() if "exp_avg_sq" in k)
                    assert squares == pytest.approx(known, rel=1e-6)
                elif look == "state_dict" and stage < 3:
                    assert_same(dict(model.state_dict()), expected.weights)
                elif look == "state_dict":
                    with pytest.raises(RuntimeError, match="full_state_dict"):
                        model.state_dict()
                elif stage < 3:
                    zeroshard.synchronize(model)
                    assert_same({n: p.detach() for n, p in model.named_parameters()}, expected.weights)


@on_ranks(2)
def test_parameters_read_without_waiting_are_not_stale_but_missing() -> None:
    with slow_host(0.05):
        for stage in STAGES:
            model, optimizer = sharded(stage=stage)
            train(model, optimizer, range(1))
            weight = model.blocks[1].up.weight
            assert bool(weight.isnan().all())
            with pytest.raises(RuntimeError), torch.no_grad():
                weight.add_(1)
            zeroshard.synchronize(model)


@on_ranks(2)
def test_a_backward_through_parameters_that_a_step_has_changed_raises_as_in_torch() -> None:
    for offload in (Offload(), Offload(host_fraction=0.5)):
        model, optimizer = sharded(offload, stage=2)
        loss_of(model, 0).backward()
        late = loss_of(model, 1)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()
        dist.barrier()


PLACES: list[tuple[int, dict[str, Any]]] = [
    (2, {"offload": None}),
    (0, {"offload": Offload()}),
    (1, {"offload": Offload(host_fraction=0.5)}),
    (3, {"offload": Offload(split_master=True)}),
    (3, {"offload": ON_HOST}),
    (2, {"offload": replace(IN_BACKWARD, split_master=True)}),
    (3, {"offload": Offload(delayed_update_after=100)}),
]


def moved(source: tuple[int, dict[str, Any]], target: tuple[int, dict[str, Any]], **options: Any) -> Result:
    """Trains two steps in one place, moves everything to another, and trains two more there."""
    model, optimizer = sharded(stage=source[0], **source[1], **options)
    train(model, optimizer, range(2))
    weights, states = zeroshard.full_state_dict(model), optimizer.state_dict()
    model = small()
    model.load_state_dict(weights)
    made = adamw(model)
    for group in made.param_groups:
        group["lr"] = 123.0  # to be replaced
    model, optimizer = zeroshard.shard(model, made, stage=target[0], **target[1], **options)
    optimizer.load_state_dict(states)
    assert_same(zeroshard.full_state_dict(model), weights)
    train(model, optimizer, range(2, 4))
    return Result(zeroshard.full_state_dict(model), {}, 0, None)


OFFLOADED = [place for place in PLACES if place[1]["offload"] is not None and place[0] != 1]


def test_a_state_moves_between_all_places_without_losing_a_bit() -> None:
    expected = SCENARIOS["plain in bf16"].run(2, Offload()).weights
    for number, source in enumerate(OFFLOADED):
        for target in OFFLOADED[number % 2 :: 2]:
            assert_same(moved(source, target, **BF16).weights, expected)
    exact = SCENARIOS["plain"].run(2)
    for target in PLACES[1:3]:
        for pair in ((PLACES[0], target), (target, PLACES[0])):
            assert_close_result(moved(*pair), exact, f"{pair}")


@on_ranks(2)
def test_a_state_moves_between_stages_and_places_without_losing_a_bit() -> None:
    expected = SCENARIOS["plain in bf16"].run(2, Offload()).weights
    for source, target in ((1, 2), (2, 0), (3, 1)):
        assert_same(moved(OFFLOADED[source], OFFLOADED[target], **BF16).weights, expected)
    assert_close_result(moved(PLACES[0], PLACES[2]), SCENARIOS["plain"].run(2), "from the device")


def test_a_state_may_be_loaded_where_parameters_are_read_back() -> None:
    expected = SCENARIOS["plain in bf16"].run(2, Offload()).weights
    model, optimizer = sharded(stage=2, **BF16)
    train(model, optimizer, range(2))
    states, weights = optimizer.state_dict(), zeroshard.full_state_dict(model)
    model, optimizer = sharded(READ_BACK, stage=3, **BF16)  # the state dict has the masters, so nothing else is needed
    optimizer.load_state_dict(states)
    assert_same(zeroshard.full_state_dict(model), weights)
    train(model, optimizer, range(2, 4))
    assert_same(zeroshard.full_state_dict(model), expected)


@on_ranks(2)
def test_masters_in_a_state_dict_replace_those_on_the_host() -> None:
    model, optimizer = sharded(stage=2, **BF16)
    train(model, optimizer, range(2))
    states, weights = optimizer.state_dict(), zeroshard.full_state_dict(model)
    for stage, offload in ((0, Offload()), (3, SPLIT), (3, ON_HOST), (1, Offload(delayed_update_after=0))):
        model, optimizer = sharded(offload, stage=stage, **BF16)
        train(model, optimizer, range(7, 9))  # something to be forgotten
        optimizer.load_state_dict(states)
        assert_same(zeroshard.full_state_dict(model), weights)
        assert_same(masters(optimizer), {str(n): state["master"] for n, state in states["state"].items()})


def test_the_state_of_plain_torch_is_taken_over_at_shard_and_by_load_state_dict() -> None:
    def begun() -> tuple[Net, torch.optim.Optimizer]:
        model = small()
        optimizer = grouped(model)
        train(model, optimizer, range(2))
        return model, optimizer

    reference, optimizer = begun()
    states = copy.deepcopy(optimizer.state_dict())  # torch's has the live tensors in it
    weights = {name: value.clone() for name, value in reference.state_dict().items()}
    train(reference, optimizer, range(2, 4))
    for stage, offload in ((0, Offload()), (3, Offload(parameters="cpu")), (2, Offload(host_fraction=0.5))):
        model, made = begun()
        model, ours = zeroshard.shard(model, made, stage=stage, offload=offload)
        train(model, ours, range(2, 4))
        assert_close(zeroshard.full_state_dict(model), dict(reference.state_dict()))
        model = small()
        model.load_state_dict(weights)
        model, ours = zeroshard.shard(model, grouped(model), stage=stage, offload=offload)
        ours.load_state_dict(states)
        train(model, ours, range(2, 4))
        assert_close(zeroshard.full_state_dict(model), dict(reference.state_dict()))
        assert {float(state["step"]) for state in ours.state_dict()["state"].values()} == {4.0}


WRITTEN = [
    Offload(),
    SPLIT,
    READ_BACK,
    Offload(delayed_update_after=0),
    IN_BACKWARD,
]


@pytest.mark.parametrize("offload", WRITTEN, ids=lambda offload: str(offload)[8:70])
@on_ranks(2)
def test_values_written_while_gathered_are_what_the_next_step_starts_from(offload: Offload) -> None:
    for stage in (1, 3):
        model, optimizer = sharded(offload, sgd, stage=stage, **BF16)
        train(model, optimizer, range(2))
        with zeroshard.gathered(model, write=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.float().mul(4).round().div(4) + 0.25)
            kept = {name: value.clone() for name, value in model.state_dict().items()}
        assert_same(zeroshard.full_state_dict(model), kept)
        named = [name for name, _ in model.named_parameters()]
        for name, master in zip(named, masters(optimizer).values(), strict=True):
            assert torch.equal(master, kept[name].float()), f"stage {stage}: {name}"
        train(model, optimizer, range(2, 3))
        zeroshard.synchronize(model)
        changed = zeroshard.full_state_dict(model)
        assert any(not torch.equal(changed[name], kept[name]) for name in kept)


def test_a_master_keeps_its_lower_bits_where_nothing_was_written() -> None:
    for stage, offload in ((0, Offload()), (2, SPLIT), (3, READ_BACK), (3, ON_HOST)):
        model, optimizer = sharded(offload, stage=stage, **BF16)
        train(model, optimizer, range(2))
        before = masters(optimizer)
        with zeroshard.gathered(model, write=True):
            pass
        assert_same(masters(optimizer), before)


# -- contracts of update_in_backward ---------------------------------------------------------------------------------

NAMED = r"offload\.update_in_backward: "


@pytest.mark.parametrize("stage", [2, 3])
def test_a_second_backward_a_dropped_gradient_or_a_changed_setting_is_refused_after_early_updates(
    stage: int,
) -> None:
    def second(model: Any, optimizer: Any) -> None:
        loss_of(model, 1).backward()

    def dropped(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        loss_of(model, 1)

    def dropped_before_step(model: Any, optimizer: Any) -> None:
        model.zero_grad(set_to_none=False)
        optimizer.step()

    def one_dropped(model: Any, optimizer: Any) -> None:
        model.first.bias.grad = None
        optimizer.step()

    def changed(model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 5.0
        optimizer.step()

    def changed_betas(model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["betas"] = (0.5, 0.5)
        optimizer.step()

    for what in (second, dropped, dropped_before_step, one_dropped, changed, changed_betas):
        model, optimizer = sharded(IN_BACKWARD, stage=stage)
        train(model, optimizer, range(2))
        loss_of(model, 0).backward()
        with refused(what.__name__, NAMED):
            what(model, optimizer)


@on_ranks(2)
def test_where_backward_updates_ranks_refuse_a_dropped_gradient_together() -> None:
    for stage in (1, 3):
        model, optimizer = sharded(IN_BACKWARD, stage=stage)
        loss_of(model, 0).backward()
        optimizer.zero_grad()
        with refused("step without a gradient", NAMED):
            optimizer.step()
        dist.barrier()


def test_settings_may_change_between_step_and_backward_where_backward_updates() -> None:
    model, optimizer = sharded(IN_BACKWARD, stage=2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(3):
        loss = loss_of(model, step)
        optimizer.param_groups[0]["weight_decay"] = 0.1 * step
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


class Lazy(nn.Module):
    """One unit, a part of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 9), nn.Linear(9, 9)

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        x = self.first(x)
        return self.second(x) if whole else x


@pytest.mark.parametrize("pattern", [(False, True), (False, False), (True, False)])
def test_a_second_backward_is_refused_where_backward_updates_also_if_the_first_left_a_parameter_out(
    pattern: tuple[bool, bool],
) -> None:
    model = seeded(Lazy)
    model, optimizer = zeroshard.shard(model, adamw(model), stage=2, offload=IN_BACKWARD)
    with refused("a second backward", NAMED):
        for whole in pattern:
            model(batch(0), whole).square().mean().backward()
        optimizer.step()


def test_clipping_by_hand_is_refused_where_backward_updates() -> None:
    model, optimizer = sharded(IN_BACKWARD, stage=2)
    loss_of(model, 0).backward()
    with refused("clipping after the update", r"offload\.update_in_backward"):
        optimizer.clip_grad_norm_(1.0)


# -- traffic, volume and memory --------------------------------------------------------------------------------------


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


@on_ranks(2)
def test_host_memory_is_divided_among_ranks_as_optimizer_states_are() -> None:
    for stage in STAGES:
        model, optimizer = sharded(stage=stage, **BF16)
        train(model, optimizer, range(2))
        stats = zeroshard.stats(model)
        assert stats.host_memory is not None
        assert stats.host_memory.total == 14 * stats.padded_parameters // (2 if stage else 1), f"stage {stage}"


def live_bytes() -> int:
    gc.collect()
    tensors = [found for found in gc.get_objects() if isinstance(found, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


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


# -- start -----------------------------------------------------------------------------------------------------------


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


# -- failure and end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_an_update_that_fails_is_heard_in_the_next_call_and_in_all_later_ones(stage: int) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("the kernel is ill")

    original = pipeline.run_together
    for offload in (Offload(), IN_BACKWARD, Offload(delayed_update_after=0), READ_BACK):
        model, optimizer = sharded(offload, stage=stage, **BF16)
        train(model, optimizer, range(1))
        zeroshard.synchronize(model)
        pipeline.run_together = fail
        try:
            with pytest.raises(OffloadError, match="the kernel is ill") as first:
                train(model, optimizer, range(1, 4))
        finally:
            pipeline.run_together = original
        causes = [first.value.__cause__, getattr(first.value.__cause__, "__cause__", None)]
        assert any(isinstance(cause, ArithmeticError) for cause in causes)
        for call in (
            lambda model=model: zeroshard.synchronize(model),
            lambda optimizer=optimizer: optimizer.state,
            lambda optimizer=optimizer: optimizer.state_dict(),
        ):
            with pytest.raises(OffloadError, match="checkpoint"):
                call()


@on_ranks(2)
def test_an_update_that_fails_on_one_rank_is_known_by_name_on_the_others() -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("the kernel is ill")

    original, rank = pipeline.run_together, dist.get_rank()
    for stage in (2, 3):
        model, optimizer = sharded(Offload(), stage=stage, stall_timeout=4.0, **BF16)
        train(model, optimizer, range(1))
        zeroshard.synchronize(model)
        dist.barrier()
        if rank == 1:
            pipeline.run_together = fail
        began = time.monotonic()
        try:
            with pytest.raises(OffloadError if rank == 1 else StallError) as raised:
                train(model, optimizer, range(1, 4))
        finally:
            pipeline.run_together = original
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
