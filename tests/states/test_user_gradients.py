"""``parameter.grad`` in the hands of users: what they do to it holds, or raises; nothing is lost without a word."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.matrix import Stages, in_stages
from tests.models import Net, loss_of, net
from tests.ranks import on_ranks
from tests.training import (
    INNER,
    STAGES,
    adamw,
    assert_close,
    assert_same,
    refused,
    sgd,
    shard,
    train,
    trained_plainly,
    weights,
)


@on_ranks(2)
def test_gradients_are_real_in_stage_zero_and_stand_ins_elsewhere() -> None:
    plain = net(depth=2)
    ddp = DistributedDataParallel(plain)
    loss_of(ddp, 0).backward()
    for stage in STAGES:
        model, optimizer = shard(stage=stage)
        assert all(p.grad is None for p in model.parameters())
        loss_of(model, 0).backward()
        for (name, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert p.grad is not None, name
            assert p.grad.shape == p.shape
            if stage == 0:
                assert torch.equal(p.grad, expected.grad), name
            else:
                assert type(p.grad) is not torch.Tensor
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())


@in_stages
@on_ranks(2)
def test_a_grad_scaler_that_is_switched_off_changes_nothing(stages: Stages) -> None:
    expected = dict(trained_plainly(1).state_dict())
    for stage in stages:
        model, optimizer = shard(stage=stage)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(loss_of(model, 0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert_same(weights(model), expected)


ZEROINGS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "optimizer to none": lambda model, optimizer: optimizer.zero_grad(set_to_none=True),
    "model to none": lambda model, optimizer: model.zero_grad(set_to_none=True),
    "optimizer to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    "by hand, zero_": lambda model, optimizer: [p.grad.zero_() for p in model.parameters() if p.grad is not None],
}


@in_stages
@pytest.mark.parametrize("way", ZEROINGS)
@on_ranks(2)
def test_zeroed_gradients_are_not_trained_with(stages: Stages, way: str) -> None:
    expected = dict(trained_plainly(1).state_dict())
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        loss_of(model, 1).backward()
        ZEROINGS[way](model, optimizer)
        optimizer.step()
        assert_same(weights(model), expected)


@in_stages
@pytest.mark.parametrize("way", ZEROINGS)
@on_ranks(2)
def test_zeroed_gradients_do_not_come_back_with_the_next_backward(stages: Stages, way: str) -> None:
    expected = dict(trained_plainly(3).state_dict())
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        for step in (1, 2):
            loss_of(model, step + 10).backward()
            ZEROINGS[way](model, optimizer)
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(weights(model), expected)


@in_stages
@on_ranks(2)
def test_zeroed_gradients_of_a_backward_without_synchronisation_do_not_come_back(stages: Stages) -> None:
    expected = dict(trained_plainly(2).state_dict())
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        with zeroshard.no_sync(model):
            loss_of(model, 11).backward()
        optimizer.zero_grad()
        train(model, optimizer, 1)
        assert_same(weights(model), expected)


@in_stages
@on_ranks(2)
def test_zeroed_gradients_of_accumulated_micro_batches_do_not_come_back(stages: Stages) -> None:
    expected = dict(trained_plainly(2).state_dict())
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        for micro in range(3):
            loss_of(model, 20 + micro).backward()
        optimizer.zero_grad()
        train(model, optimizer, 1)
        assert_same(weights(model), expected)


@in_stages
@on_ranks(2)
def test_zeroing_some_gradients_holds_for_those_alone(stages: Stages) -> None:
    plain = net(depth=2)
    ddp, optimizer = DistributedDataParallel(plain), adamw(plain.parameters())

    def zero(model: Net) -> None:
        model.blocks[0].zero_grad()
        model.last.bias.grad = None
        model.blocks[1].up.weight.grad = None

    for step in range(2):
        loss_of(ddp, step).backward()
        zero(plain)
        optimizer.step()
        optimizer.zero_grad()
    for stage in stages:
        model, sharded = shard(adamw, stage=stage)
        for step in range(2):
            loss_of(model, step).backward()
            zero(model)
            sharded.step()
            sharded.zero_grad()
        assert_same(weights(model), dict(plain.state_dict()))


@in_stages
@on_ranks(2)
def test_zeroing_some_gradients_between_micro_batches_holds_for_those_alone(stages: Stages) -> None:
    plain = net(depth=2)
    ddp, optimizer = DistributedDataParallel(plain), sgd(plain.parameters())

    def run(module: nn.Module, model: Net, stepper: torch.optim.Optimizer) -> None:
        loss_of(module, 0).backward()
        model.blocks[0].zero_grad()
        model.first.weight.grad = None
        loss_of(module, 1).backward()
        stepper.step()

    run(ddp, plain, optimizer)
    for stage in stages:
        model, sharded = shard(stage=stage)
        run(model, model, sharded)
        assert_close(weights(model), dict(plain.state_dict()))


@in_stages
@on_ranks(2)
def test_a_clipping_that_was_zeroed_with_its_gradients_does_not_clip_the_next_ones(stages: Stages) -> None:
    expected = dict(trained_plainly(1).state_dict())
    for stage in stages:
        model, optimizer = shard(stage=stage)
        loss_of(model, 5).backward()
        optimizer.clip_grad_norm_(1e-3)
        optimizer.zero_grad()
        train(model, optimizer, 0)
        assert_same(weights(model), expected)


@in_stages
@on_ranks(2)
def test_a_parameter_unfrozen_after_sharding_raises_rather_than_not_being_trained(stages: Stages) -> None:
    for stage in stages:
        model = net(depth=2)
        model.last.weight.requires_grad_(False)
        model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        train(model, optimizer, 0)
        model.last.weight.requires_grad_(True)
        with refused(f"unfreezing in stage {stage}", r"last\.weight"):
            train(model, optimizer, 1)


@in_stages
@on_ranks(2)
def test_two_steps_in_a_row_do_not_train_twice(stages: Stages) -> None:
    expected = dict(trained_plainly(1, adamw).state_dict())
    for stage in stages:
        model, optimizer = shard(adamw, stage=stage)
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.step()
        assert_same(weights(model), expected)


@in_stages
@on_ranks(2)
def test_a_step_before_any_backward_changes_nothing(stages: Stages) -> None:
    for stage in stages:
        model, optimizer = shard(adamw, stage=stage)
        optimizer.step()
        assert_same(weights(model), dict(net(depth=2).state_dict()))
        train(model, optimizer, 0)
        assert_same(weights(model), dict(trained_plainly(1, adamw).state_dict()))


@in_stages
@on_ranks(2)
def test_zeroed_gradients_of_a_block_that_only_the_other_rank_called_do_not_come_back(stages: Stages) -> None:
    expected = dict(trained_plainly(2).state_dict())
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        blocks = model.blocks if stage == 3 else model.blocks[: 1 + dist.get_rank()]  # stage 3 gathers together
        whole, model.blocks = model.blocks, blocks
        loss_of(model, 11).backward()
        model.blocks = whole
        optimizer.zero_grad()
        train(model, optimizer, 1)
        assert_same(weights(model), expected)


def test_a_gradient_assigned_over_one_that_was_not_reduced_yet_counts_alone() -> None:
    model, optimizer = shard(stage=0)
    before = weights(model)[INNER]
    with zeroshard.no_sync(model):
        loss_of(model, 0).backward()
    model.get_parameter(INNER).grad = torch.ones(39, 13)
    optimizer.step()
    torch.testing.assert_close(weights(model)[INNER], before - 0.1)


def test_a_gradient_assigned_after_clipping_an_accumulated_one_is_not_clipped() -> None:
    model, optimizer = shard(stage=0, precision="bf16")
    before = weights(model)[INNER]
    for micro in range(2):
        loss_of(model, micro).backward()
    optimizer.clip_grad_norm_(1e-3)
    model.get_parameter(INNER).grad = torch.ones(39, 13, dtype=torch.bfloat16)
    optimizer.step()
    torch.testing.assert_close(weights(model)[INNER], before - 0.1, rtol=0.02, atol=1e-3)


UPDATED_IN_BACKWARD = zeroshard.Offload(update_in_backward=True)


def test_a_parameter_whose_unreduced_gradient_was_dropped_is_not_updated_by_an_update_in_backward() -> None:
    model, optimizer = shard(adamw, offload=UPDATED_IN_BACKWARD)
    before = weights(model)
    with zeroshard.no_sync(model):
        loss_of(model, 0).backward()
    model.get_parameter(INNER).grad = None
    optimizer.step()
    after = weights(model)
    assert [name for name in before if torch.equal(before[name], after[name])] == [INNER], "not even by weight decay"


def test_gradients_zeroed_between_forward_and_backward_leave_room_for_an_update_in_backward() -> None:
    model, optimizer = shard(adamw, offload=UPDATED_IN_BACKWARD)
    torch.autograd.backward(loss_of(model, 5), inputs=[model.get_parameter(INNER)])
    loss = loss_of(model, 0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    plain = net(depth=2)
    train(plain, adamw(plain.parameters()), 0)
    torch.testing.assert_close(weights(model), dict(plain.state_dict()))
