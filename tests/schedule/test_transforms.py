"""``torch.func`` over a sharded model gives what it gives over the plain model, or names the remedy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

import zeroshard
from tests.matrix import Stages, in_stages
from tests.models import Net, batch, loss_of, net
from tests.ranks import on_ranks
from tests.training import STAGES, assert_close, assert_same, refused, sgd, shard, train, weights

Parameters = dict[str, Tensor]


def copies(model: nn.Module) -> Parameters:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def loss_with(model: nn.Module, parameters: Parameters, x: Tensor) -> Tensor:
    output: Tensor = functional_call(model, parameters, (x,))
    return output.square().mean()


VALUES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda model, x: grad(lambda x: model(x).square().mean())(x),
    "vmap": lambda model, x: vmap(model)(x),
    "jvp": lambda model, x: jvp(model, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda model, x: jacrev(model)(x),
    "hessian": lambda model, x: hessian(lambda x: model(x).square().mean())(x[:1]),
    "grad of parameters": lambda model, x: grad(lambda p: loss_with(model, p, x))(copies(model)),
    "grad of each sample": lambda model, x: vmap(
        grad(lambda p, row: loss_with(model, p, row[None])), in_dims=(None, 0)
    )(copies(model), x),
}


def as_dict(values: Any) -> Parameters:
    return values if isinstance(values, dict) else {"value": values}


def whole(model: nn.Module, stage: int) -> AbstractContextManager[None]:
    return zeroshard.gathered(model) if stage == 3 else nullcontext()


@in_stages
@on_ranks(2)
def test_values_and_derivatives_equal_those_of_the_plain_model_and_training_goes_on(stages: Stages) -> None:
    for stage in stages:
        model, optimizer = shard(stage=stage)
        train(model, optimizer, 0)
        plain = net(depth=2)
        plain.load_state_dict(weights(model))
        x = batch(1)
        for name, compute in VALUES.items():
            with whole(model, stage):
                ours = compute(model, x)
            assert_close(as_dict(ours), as_dict(compute(plain, x)))
            assert all(parameter.grad is None for parameter in model.parameters()), name
        train(model, optimizer, 1)
        plain_optimizer = sgd(plain.parameters())
        step_by_hand(plain, plain_optimizer, loss_of(plain, 1))
        assert_same(weights(model), dict(plain.state_dict()))


@on_ranks(2)
def test_derivatives_in_stage_three_are_refused_outside_gathered_and_nothing_is_left_behind() -> None:
    model, optimizer = shard(stage=3)
    expected = weights(model)
    with torch.no_grad():
        assert torch.allclose(vmap(model)(batch(1)), net(depth=2)(batch(1)))  # values alone need no block
    for name in ("grad", "vmap", "jvp", "jacrev"):
        with refused(name, r"torch\.func needs .*'\(root\)'.*stage 3.*with zeroshard\.gathered\(model\):"):
            VALUES[name](model, batch(1))
    assert_same(weights(model), expected)
    train(model, optimizer, 0)


def step_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """What DDP does, for losses that do not come from a call of DDP."""
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()


def own(model: nn.Module, x: Tensor) -> Tensor:
    return loss_with(model, dict(model.named_parameters()), x)


def changed(model: nn.Module, x: Tensor) -> Tensor:
    return loss_with(model, {name: 2 * parameter for name, parameter in model.named_parameters()}, x)


def partly(model: nn.Module, x: Tensor) -> Tensor:
    return loss_with(model, {"last.weight": torch.ones(5, 13), "last.bias": 3 * model.get_parameter("last.bias")}, x)


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    gradient = grad(lambda x: model(x).square().mean())(x)
    return gradient.square().sum() + own(model, x)


def each_sample(model: nn.Module, x: Tensor) -> Tensor:
    return vmap(model)(x).square().mean()


@in_stages
@on_ranks(2)
def test_losses_through_torch_func_train_as_under_ddp(stages: Stages) -> None:
    for loss in (own, changed, partly, penalty, each_sample):
        plain = net(depth=2)
        optimizer: torch.optim.Optimizer = sgd(plain.parameters())
        for step in range(3):
            step_by_hand(plain, optimizer, loss(plain, batch(step)))
        for stage in stages:
            model, optimizer = shard(stage=stage)
            for step in range(3):
                with whole(model, stage):
                    found = loss(model, batch(step))
                    found.backward()
                optimizer.step()
                optimizer.zero_grad()
            try:
                assert_close(weights(model), dict(plain.state_dict()))
            except AssertionError as error:
                raise AssertionError(f"{loss.__name__} in stage {stage}") from error


@on_ranks(2)
def test_functional_call_trains_in_stage_three_without_a_block() -> None:
    for loss in (own, changed):
        plain = net(depth=2)
        optimizer: torch.optim.Optimizer = sgd(plain.parameters())
        model, sharded = shard(stage=3)
        for step in range(3):
            step_by_hand(plain, optimizer, loss(plain, batch(step)))
            loss(model, batch(step)).backward()
            sharded.step()
            sharded.zero_grad()
        assert_close(weights(model), dict(plain.state_dict()))


def test_gradients_that_pass_by_the_loss_scale_are_refused() -> None:
    model: Net
    for stage in STAGES:
        model, _ = shard(stage=stage, precision="fp16")
        with refused("torch.func with fp16", r"loss scale.*precision=\"bf16\""):
            grad(lambda x, model=model: model(x).sum())(batch(0))
