"""Rare but legitimate ways to use a model that once went wrong; each is compared with DDP or plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.matrix import Stages, in_stages
from tests.models import Block, batch, loss_of, net
from tests.ranks import on_ranks
from zeroshard import LossScale, Precision

STAGES = (0, 1, 2, 3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def assert_weights(model: nn.Module, plain: nn.Module, stage: int) -> None:
    for name, value in zeroshard.full_state_dict(model).items():
        torch.testing.assert_close(
            value, plain.state_dict()[name], msg=lambda text, name=name: f"stage {stage} {name}: {text}"
        )


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.blocks = nn.ModuleList(Block(9) for _ in range(3))
        self.last = nn.Linear(9, 5)
        self.extra = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def encode(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def stack() -> Stack:
    torch.manual_seed(4)
    return Stack()


@in_stages
@on_ranks(2)
def test_padding_between_parameters_costs_no_gradient(stages: Stages) -> None:
    class Gapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.ones(1))
            self.scale = nn.Parameter(torch.ones(64))
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * self.scale) * self.gate

    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    for stage in stages:
        torch.manual_seed(0)
        plain = Gapped()
        torch.manual_seed(0)
        model = Gapped()
        model, optimizer = zeroshard.shard(model, sgd(model), stage=stage)
        other = sgd(plain)
        for each, each_optimizer in ((model, optimizer), (plain, other)):
            each(x).square().mean().backward()
            each_optimizer.step()
        assert_weights(model, plain, stage)


def outside_loss(model: Any, x: Tensor) -> Tensor:
    """A part of the loss that did not come out of the model's forward."""
    extra = model.extra if isinstance(model, Stack) else model.module.extra
    return model(x).square().mean() + extra.pow(2).sum()


@pytest.mark.parametrize("micro_batches", [1, 2])
@on_ranks(2)
def test_a_loss_may_use_parameters_beside_the_models_output(micro_batches: int) -> None:
    for stage in (0, 1, 2):  # in stage 3 such a parameter is not there
        plain = stack()
        ddp = DistributedDataParallel(plain)
        model = stack()
        model, optimizer = zeroshard.shard(model, sgd(model), stage=stage)
        other = sgd(plain)
        for step in range(3):
            zeroshard.synchronize(model)
            for micro in range(micro_batches):
                outside_loss(model, batch(10 * step + micro)).backward()
                outside_loss(ddp, batch(10 * step + micro)).backward()
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
        assert_weights(model, plain, stage)


@in_stages
@pytest.mark.parametrize("way", ["forward", "encode", "reentrant checkpoint"])
@on_ranks(2)
def test_the_model_may_be_entered_by_another_door(stages: Stages, way: str) -> None:
    doors = {
        "forward": lambda model, x: model.forward(x),
        "encode": lambda model, x: model.encode(x),
        "reentrant checkpoint": lambda model, x: checkpoint(model, x.clone().requires_grad_(), use_reentrant=True),
    }
    for stage in stages:
        plain = stack()
        ddp = DistributedDataParallel(plain, find_unused_parameters=True)
        model = stack()
        model, optimizer = zeroshard.shard(model, sgd(model), stage=stage)
        other = sgd(plain)
        for step in range(3):
            doors[way](model, batch(step)).square().mean().backward()
            ddp(batch(step)).square().mean().backward()
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
        assert_weights(model, plain, stage)


@on_ranks(2)
def test_each_rank_may_drop_other_layers_in_stages_0_to_2() -> None:
    class Dropping(Stack):
        def forward(self, x: Tensor, step: int) -> Tensor:
            x = self.first(x)
            for number, block in enumerate(self.blocks):
                if (number + step + dist.get_rank()) % 3:
                    x = block(x)
            return self.last(x)

    for stage in (0, 1, 2):
        torch.manual_seed(4)
        plain = Dropping()
        ddp = DistributedDataParallel(plain, find_unused_parameters=True)
        torch.manual_seed(4)
        model = Dropping()
        model, optimizer = zeroshard.shard(model, sgd(model), stage=stage)
        other = sgd(plain)
        for step in range(4):
            for each, each_optimizer in ((model, optimizer), (ddp, other)):
                each(batch(step), step).square().mean().backward()
                each_optimizer.step()
                each_optimizer.zero_grad()
        assert_weights(model, plain, stage)


@in_stages
@on_ranks(2)
def test_a_unit_may_be_called_inside_another(stages: Stages) -> None:
    class Layer(Block):
        def forward(self, x: Tensor, adapter: nn.Module) -> Tensor:
            return x + self.down(torch.relu(adapter(self.up(self.norm(x)))))

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(7) for _ in range(3))
            self.adapters = nn.ModuleList(nn.Linear(21, 21) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer, adapter in zip(self.layers, self.adapters, strict=True):
                x = layer(x, adapter)
            return x

    for stage in stages:
        torch.manual_seed(0)
        plain = Adapted()
        ddp = DistributedDataParallel(plain)
        torch.manual_seed(0)
        model = Adapted()
        model, optimizer = zeroshard.shard(model, sgd(model), stage=stage)
        other = sgd(plain)
        for step in range(3):
            for each, each_optimizer in ((model, optimizer), (ddp, other)):
                each(batch(step)).square().mean().backward()
                each_optimizer.step()
                each_optimizer.zero_grad()
        assert_weights(model, plain, stage)


@on_ranks(2)
def test_the_loss_scale_ends_where_the_model_does() -> None:
    for stage in (0, 3):
        precision = Precision(parameters=torch.float16, loss_scale=LossScale(initial=64.0))
        model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.125)
        model, optimizer = zeroshard.shard(
            model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, precision=precision
        )
        x = torch.ones(2, 7, requires_grad=True)
        model(model(x)).sum().backward()
        assert x.grad is not None
        assert float(x.grad.abs().max()) == pytest.approx((7 * 0.125) ** 4, rel=0.01)
        optimizer.step()
        assert float(zeroshard.full_state_dict(model)["1.bias"].abs().max()) < 2


@in_stages
@on_ranks(2)
def test_backward_with_create_graph_trains(stages: Stages) -> None:
    for stage in stages:
        plain, model = net(), net()
        ddp = DistributedDataParallel(plain)
        model, optimizer = zeroshard.shard(model, sgd(model), stage=stage)
        other = sgd(plain)
        loss_of(model, 0).backward(create_graph=True)
        loss_of(ddp, 0).backward()
        optimizer.step()
        other.step()
        assert_weights(model, plain, stage)


@on_ranks(2)
def test_gradients_stay_shards_after_unusual_steps() -> None:
    """A step inside no_sync, a failed backward, a skipped block: none makes later backwards keep whole gradients."""
    for stage in (2, 3):
        model: Any = net(width=64)
        model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.01), stage=stage)
        with zeroshard.no_sync(model):
            loss_of(model, 0).backward()
        optimizer.step()
        handle = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, 1)
        handle.remove()
        for step in range(2):
            loss_of(model, 2 + step).backward()
            optimizer.step()
        loss_of(model, 5).backward()
        optimizer.clip_grad_norm_(1.0)  # settles what is under way
        stats = zeroshard.stats(model)
        assert stats.memory.gradients == 4 * stats.padded_parameters // 2, stage


@in_stages
@on_ranks(2)
def test_double_precision_accumulates_in_double_precision(stages: Stages) -> None:
    for stage in stages:
        plain, model = net().double(), net().double()
        ddp = DistributedDataParallel(plain)
        model, optimizer = zeroshard.shard(model, sgd(model), stage=stage)
        other = sgd(plain)
        for micro in range(2):
            model(batch(micro).double()).square().mean().backward()
            ddp(batch(micro).double()).square().mean().backward()
        optimizer.step()
        other.step()
        for name, value in zeroshard.full_state_dict(model).items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-13, atol=1e-13)


@in_stages
@on_ranks(2)
def test_a_16_bit_model_without_masters_accumulates_and_clips(stages: Stages) -> None:
    for stage in stages:
        model = net().bfloat16()
        model, optimizer = zeroshard.shard(model, sgd(model), stage=stage)
        for micro in range(2):
            model(batch(micro).bfloat16()).float().square().mean().backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        assert all(value.isfinite().all() for value in zeroshard.full_state_dict(model).values())


@on_ranks(2)
def test_clipping_shows_where_gradients_show() -> None:
    model = net()
    model, optimizer = zeroshard.shard(model, sgd(model), stage=0)
    (1000 * loss_of(model, 0)).backward()
    assert optimizer.clip_grad_norm_(0.1) > 1
    shown = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert float(shown) == pytest.approx(0.1, rel=1e-3)


@on_ranks(2)
def test_a_step_inside_gathered_is_refused() -> None:
    model = net()
    model, optimizer = zeroshard.shard(model, sgd(model), stage=3)
    loss_of(model, 0).backward()
    with zeroshard.gathered(model), pytest.raises(RuntimeError, match="leave the block first"):
        optimizer.step()
    optimizer.step()
