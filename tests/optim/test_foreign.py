"""An optimizer that shard() did not return, and that holds parameters of a sharded model, is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.matrix import Stages, in_stages
from tests.models import Net, batch, loss_of, net
from tests.ranks import on_ranks
from tests.training import adamw, assert_same, sgd, shard, train, trained_plainly, weights

REFUSAL = r"AdamW\.step\(\).*'first\.weight'.*that shard\(\) returned.*optimizers=\(optimizer, scheduler\)"


@in_stages
@on_ranks(2)
def test_a_foreign_optimizer_is_refused_by_name_before_it_changes_anything(stages: Stages) -> None:
    expected = dict(trained_plainly(2).state_dict())
    for stage in stages:
        model = net(depth=2)
        before = adamw(model.parameters())
        model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        train(model, optimizer, 0)
        loss_of(model, 1).backward()
        for foreign in (before, adamw(model.parameters())):
            with pytest.raises(RuntimeError, match=REFUSAL):
                foreign.step()
            assert not foreign.state
        optimizer.step()
        assert_same(weights(model), expected)


@on_ranks(2)
def test_a_foreign_optimizer_of_a_part_or_with_a_closure_is_refused_with_offload_too() -> None:
    model, optimizer = shard(adamw, stage=2, offload="cpu")

    def closure() -> float:
        pytest.fail("the closure ran")

    for foreign in (torch.optim.LBFGS([model.blocks[1].up.bias]), torch.optim.SGD(model.blocks[1].parameters())):
        with pytest.raises(RuntimeError, match=rf"{type(foreign).__name__}\.step\(\).*'blocks\.1\.\w+\.(bias|weight)'"):
            foreign.step(closure)
    train(model, optimizer, 0)


class Wrapper(torch.optim.Optimizer):
    """As libraries wrap an optimizer: the groups are those of the optimizer inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@in_stages
@on_ranks(2)
def test_other_optimizers_step_as_ever(stages: Stages) -> None:
    expected = dict(trained_plainly(2).state_dict())
    for stage in stages:
        model, optimizer = shard(stage=stage)
        wrapper = Wrapper(optimizer)
        other = nn.Linear(5, 1)
        others = torch.optim.Adam(other.parameters())
        for step in range(2):
            loss_of(model, step).backward()
            wrapper.step()
            wrapper.zero_grad()
            other(batch(step)[:, :5]).mean().backward()
            others.step()
        assert_same(weights(model), expected)
        assert others.state


def test_a_frozen_sharded_model_may_be_among_the_parameters_of_another_optimizer() -> None:
    teacher, _ = zeroshard.shard(net(depth=2).requires_grad_(False), stage=3)
    student: Net = net(depth=2)
    both = torch.optim.SGD([*student.parameters(), *teacher.parameters()], lr=0.1)
    (student(batch(0)) - teacher(batch(0)) + 1).square().mean().backward()
    before = student.first.weight.clone()
    both.step()
    assert not torch.equal(before, student.first.weight)
