"""Rare things that a loop does, and their neighbours: each was silently wrong once, or ended in torch's own words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.models import batch, loss_of, net
from tests.ranks import on_ranks
from tests.training import (
    INNER,
    STAGES,
    assert_close,
    assert_same,
    refused,
    sgd,
    shard,
    train,
    trained_plainly,
    weights,
)


class _Fails(torch.autograd.Function):
    """Its backward raises, as a backward does for which memory is missing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise KeyError("no memory")


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_step_after_a_failed_backward_uses_none_of_its_gradients(stage: int, offload: str | None) -> None:
    model, optimizer = shard(stage=stage, offload=offload)
    before = weights(model)
    hook = model.blocks[1].register_forward_hook(lambda module, args, output: _Fails.apply(output))
    with pytest.raises(KeyError):
        loss_of(model, 0).backward()  # model.last has its gradient
    hook.remove()
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="the last backward did not finish"):
        optimizer.step()
    assert_same(weights(model), before)


@on_ranks(2)
def test_reads_in_inference_mode_leave_a_model_that_trains() -> None:
    model, optimizer = shard(stage=3)
    with torch.inference_mode():
        model.get_parameter(INNER).norm()
        model(batch(5))
        model.get_parameter(INNER).norm()
        model.get_parameter("last.bias").norm()
    train(model, optimizer, 0)
    assert_same(weights(model), dict(trained_plainly(1).state_dict()))


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_a_gradient_is_not_the_out_argument_of_a_function(stage: int) -> None:
    model, _ = shard(stage=stage)
    loss_of(model, 0).backward()
    gradient = model.get_parameter(INNER).grad
    with refused("out=", r"mul\(out=...\) needs the whole gradient of 'blocks.0.up.weight'"):
        torch.mul(gradient, 0.5, out=gradient)


@pytest.mark.parametrize("write", ["data", "numpy"])
@pytest.mark.parametrize("options", [{"stage": 0, "offload": "cpu"}, {"stage": 2, "offload": "cpu"}])
@on_ranks(2)
def test_a_write_past_autograd_directly_after_shard_is_not_lost_in_silence(options: dict[str, Any], write: str) -> None:
    model, _ = shard(**options)
    parameter = model.get_parameter(INNER)
    if write == "data":
        parameter.data.mul_(0.5)
    else:
        values = parameter.detach().numpy()
        values *= 0.5
    with refused(write, r"was written to through \.data, .*numpy"):
        loss_of(model, 0)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_a_write_that_counts_is_not_blamed_on_a_later_block_for_reading(stage: int) -> None:
    model, _ = shard(stage=stage)
    with torch.no_grad():
        model.get_parameter(INNER).mul_(0.5)
    with zeroshard.gathered(model):
        seen = model.get_parameter(INNER).clone()
    assert torch.equal(seen, net(depth=2).get_parameter(INNER) * 0.5)


def _backward_twice(model: nn.Module, *, penalty: bool) -> None:
    """Two backwards through one graph, of which a parameter or a first backward is a part."""
    loss = loss_of(model, 0) + 0.1 * model.get_parameter(INNER).square().sum()
    if penalty:
        x = batch(1).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = loss + slope.square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("penalty", [False, True])
@on_ranks(2)
def test_a_second_backward_through_a_retained_graph_finds_the_parameters_that_the_loss_used(penalty: bool) -> None:
    model, optimizer = shard(stage=3, keep=())
    _backward_twice(model, penalty=penalty)
    optimizer.step()
    plain = net(depth=2)
    _backward_twice(plain, penalty=penalty)
    for parameter in plain.parameters():  # DDP would average the first backward alone
        dist.all_reduce(parameter.grad.div_(2))
    sgd(plain.parameters()).step()
    assert_close(weights(model), dict(plain.state_dict()))
    optimizer.zero_grad()
    train(model, optimizer, 2)
