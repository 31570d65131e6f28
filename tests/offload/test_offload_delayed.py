"""Updates that come a step late, or in 16 bits: what they compute, and what they reach."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.models import Block, loss_of
from tests.offload.cases import (
    DELAYED,
    ON_HOST,
    sharded,
    train,
)
from tests.offload.scenarios import (
    SCENARIOS,
    adamw,
    assert_same_result,
    slow_host,
    small,
)
from tests.ranks import on_ranks
from tests.training import assert_close, assert_same
from zeroshard import Offload

pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.slow
def test_small_moments_and_delayed_updates_reach_the_validation_loss_of_the_plain_step_within_one_percent() -> None:
    for seed in (0, 1, 2):
        expected = validation_loss(seed, Offload())
        assert expected < 0.9 * torch.tensor(24.0).log(), "it has learnt something"
        slim = [Offload(moments=moments, split_master=True) for moments in (torch.bfloat16, "8bit")]
        for offload in (*slim, Offload(delayed_update_after=40)):
            assert validation_loss(seed, offload) == pytest.approx(expected, rel=0.01), f"seed {seed}: {offload}"
