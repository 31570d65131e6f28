"""Parameters that user code uses in a graph: outside their unit, before or after the model's forward, in hooks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.matrix import Stages, in_stages, slow
from tests.models import Net, batch, loss_of, net
from tests.ranks import on_ranks
from tests.training import INNER, adamw, assert_close, assert_same, is_released, sgd, weights
from zeroshard.shown import absent

Loss = Callable[[nn.Module, Net, int], Tensor]
"""A loss of the model as it is called, of the model itself, and of the step."""


def decay(model: nn.Module) -> Tensor:
    return torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


def penalty_after_forward(called: nn.Module, model: Net, step: int) -> Tensor:
    return loss_of(called, step) + 0.01 * decay(model)


def penalty_before_forward(called: nn.Module, model: Net, step: int) -> Tensor:
    penalty = decay(model)
    return loss_of(called, step) + 0.01 * penalty


def logged_and_penalised(called: nn.Module, model: Net, step: int) -> Tensor:
    loss = loss_of(called, step)
    for parameter in model.parameters():
        parameter.norm().item()
    return loss + 0.01 * decay(model)


def weight_of_another_module(called: nn.Module, model: Net, step: int) -> Tensor:
    return loss_of(called, step) + (model.blocks[0].up.weight @ model.blocks[1].down.weight).square().mean()


def layer_below_its_unit(called: nn.Module, model: Net, step: int) -> Tensor:
    loss = loss_of(called, step)
    return (
        loss + model.blocks[1].down(torch.ones(2, 39)).square().mean() + model.blocks[0].norm(torch.ones(3, 13)).mean()
    )


def two_losses_with_one_penalty(called: nn.Module, model: Net, step: int) -> Tensor:
    penalty = decay(model.blocks[1])
    first = loss_of(called, step)
    return first + loss_of(called, step + 10) + 0.01 * penalty


LOSSES: dict[str, Loss] = {
    loss.__name__: loss
    for loss in (
        penalty_after_forward,
        penalty_before_forward,
        logged_and_penalised,
        weight_of_another_module,
        layer_below_its_unit,
        two_losses_with_one_penalty,
    )
}


@pytest.mark.parametrize("stage", [slow(0), 1, slow(2), 3])
@pytest.mark.parametrize("offload", [None, "cpu"])
@on_ranks(2)
def test_parameters_in_a_loss_train_as_under_ddp(stage: int, offload: str | None) -> None:
    for name, loss in LOSSES.items():
        plain, model = net(depth=2), net(depth=2)
        ddp = DistributedDataParallel(plain)
        plain_optimizer = adamw(plain.parameters())
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage, offload=offload)
        for step in range(3):
            theirs = loss(ddp, plain, step)
            theirs.backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            ours = loss(model, model, step)
            ours.backward()
            optimizer.step()
            optimizer.zero_grad()
            if offload is None:
                assert torch.equal(ours, theirs), (name, step)
        compare = assert_same if offload is None else assert_close
        compare(weights(model), dict(plain.state_dict()))


@in_stages
@on_ranks(2)
def test_a_parameter_used_inside_forward_without_a_call_of_its_unit_trains_as_under_ddp(stages: Stages) -> None:
    class Sneaky(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) @ self.blocks[0].up.weight.t()[:, :13] + self.blocks[0].norm.bias
            return self.last(self.blocks[1](x))

    def sneaky() -> Sneaky:
        torch.manual_seed(3)
        return Sneaky(depth=2)

    for stage in stages:
        plain, model = sneaky(), sneaky()
        ddp, plain_optimizer = DistributedDataParallel(plain, find_unused_parameters=True), sgd(plain.parameters())
        model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        for step in range(3):
            for called, each in ((ddp, plain_optimizer), (model, optimizer)):
                loss_of(called, step).backward()
                each.step()
                each.zero_grad()
        assert_same(weights(model), dict(plain.state_dict()))


@on_ranks(2)
def test_a_unit_in_a_graph_stays_until_backward_is_over_and_a_dropped_graph_holds_nothing() -> None:
    model = net(depth=2)
    model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=3)
    inner = model.get_parameter(INNER)
    loss = inner.square().sum()
    model.blocks[1].up.weight.norm().item()
    loss_of(model, 0)
    assert not is_released(inner)
    assert is_released(model.blocks[1].up.weight)
    loss.backward()
    assert is_released(inner)
    optimizer.step()
    inner.norm().item()
    loss_of(model, 1)
    assert is_released(inner)


@in_stages
@on_ranks(2)
def test_hooks_on_a_unit_and_inside_it_see_its_values(stages: Stages) -> None:
    for stage in stages:
        model = net(depth=2)
        model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        seen: list[Tensor] = []

        def look(module: nn.Module, *_: object, seen: list[Tensor] = seen) -> None:
            seen.append(next(p for name, p in module.named_parameters() if name.endswith("up.weight")).detach().clone())

        before = weights(model)[INNER]
        for hook in (model.blocks[0].register_forward_pre_hook, model.blocks[0].register_forward_hook):
            hook(look)
        model.register_forward_hook(lambda module, *_: look(module))
        model.blocks[0].register_full_backward_hook(look)
        loss_of(model, 0).backward()
        assert len(seen) == 4
        assert all(torch.equal(value, before) for value in seen)
        optimizer.step()


@in_stages
@on_ranks(2)
def test_an_average_of_the_weights_follows_them_exactly(stages: Stages) -> None:
    for options in ({}, {"offload": "cpu"}, {"precision": "bf16"}):
        for stage in stages:
            model = net(depth=2)
            average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, count: new.to(old.dtype))
            model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage, **options)
            for step in range(3):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model)
                expected = {name: value.float() for name, value in weights(model).items()}
                assert_same(dict(average.module.state_dict()), expected)


@on_ranks(2)
def test_the_models_own_passes_see_parameters_of_their_own_class() -> None:
    kinds: list[type] = []

    class Watching(Net):
        def forward(self, x: Tensor) -> Tensor:
            kinds.extend(type(parameter) for parameter in (self.first.weight, self.last.bias))
            return super().forward(x)

    for stage in (0, 1, 2, 3):
        torch.manual_seed(1)
        model = Watching(depth=2)
        for block in model.blocks:
            block.register_forward_hook(lambda module, *_: kinds.append(type(module.up.weight)))
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage, precision="bf16")
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            model(batch(step))
        assert all(isinstance(p, nn.Parameter) and absent.is_absent(p) for p in model.parameters())
    assert set(kinds) == {nn.Parameter}
