"""What of an offloaded model may be looked at and written, and when."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.matrix import Stages, in_stages
from tests.models import Net, batch, loss_of
from tests.offload.cases import (
    BF16,
    IN_BACKWARD,
    ON_HOST,
    READ_BACK,
    SPLIT,
    masters,
    sharded,
    train,
)
from tests.offload.scenarios import (
    SCENARIOS,
    Result,
    adamw,
    assert_close_result,
    grouped,
    seeded,
    sgd,
    slow_host,
    small,
)
from tests.ranks import on_ranks
from tests.training import assert_close, assert_same, refused
from zeroshard import Offload

pytestmark = pytest.mark.usefixtures("one_thread")


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
                elif look == "state_dict":
                    assert_same(dict(model.state_dict()), expected.weights)
                elif stage < 3:
                    zeroshard.synchronize(model)
                    assert_same({n: p.detach() for n, p in model.named_parameters()}, expected.weights)


@in_stages
@on_ranks(2)
def test_reading_a_parameter_waits_for_its_update_and_writing_to_it_is_refused(stages: Stages) -> None:
    blocking, optimizer = sharded(Offload(blocking=True), stage=2)
    train(blocking, optimizer, range(1))
    expected = zeroshard.full_state_dict(blocking)["blocks.1.up.weight"]
    with slow_host(0.05):
        for stage in stages:
            model, optimizer = sharded(stage=stage)
            train(model, optimizer, range(1))
            weight = model.blocks[1].up.weight
            with pytest.raises(RuntimeError, match=r"gathered\(model, write=True\)"), torch.no_grad():
                weight.add_(1)
            assert torch.equal(weight, expected)
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
            written = {name: value.clone() for name, value in model.state_dict().items()}
        assert_same(zeroshard.full_state_dict(model), written)
        named = [name for name, _ in model.named_parameters()]
        for name, master in zip(named, masters(optimizer).values(), strict=True):
            assert torch.equal(master, written[name].float()), f"stage {stage}: {name}"
        train(model, optimizer, range(2, 3))
        zeroshard.synchronize(model)
        changed = zeroshard.full_state_dict(model)
        assert any(not torch.equal(changed[name], written[name]) for name in written)


def test_a_master_keeps_its_lower_bits_where_nothing_was_written() -> None:
    for stage, offload in ((0, Offload()), (2, SPLIT), (3, READ_BACK), (3, ON_HOST)):
        model, optimizer = sharded(offload, stage=stage, **BF16)
        train(model, optimizer, range(2))
        before = masters(optimizer)
        with zeroshard.gathered(model, write=True):
            pass
        assert_same(masters(optimizer), before)


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
