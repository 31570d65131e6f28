"""Several backward passes before one step, with and without ``no_sync``, are exact in every stage."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.models import Net, loss_of, net
from tests.ranks import on_ranks

MICRO_BATCHES = 3


def reference(steps: int = 3) -> dict[str, torch.Tensor]:
    model = net()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        for micro in range(MICRO_BATCHES):
            (loss_of(ddp, 10 * step + micro) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def accumulate(model: Net, optimizer: torch.optim.Optimizer, delay: bool, steps: int = 3) -> dict[str, torch.Tensor]:
    for step in range(steps):
        for micro in range(MICRO_BATCHES):
            with zeroshard.no_sync(model) if delay and micro < MICRO_BATCHES - 1 else nullcontext():
                (loss_of(model, 10 * step + micro) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zeroshard.full_state_dict(model)


@pytest.mark.parametrize("delay", [False, True])
@on_ranks(2)
def test_k_backwards_before_step_equal_ddp_and_stages_agree_bitwise(delay: bool) -> None:
    expected = reference()
    results = []
    for stage in (0, 1, 2, 3):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        results.append(accumulate(*zeroshard.shard(model, optimizer, stage=stage), delay))
    for name, value in expected.items():
        torch.testing.assert_close(results[0][name], value, rtol=1e-5, atol=1e-7)
        for other in results[1:]:
            assert torch.equal(other[name], results[0][name])


@on_ranks(2)
def test_16_bit_gradients_accumulate_in_fp32_by_default_and_in_16_bit_if_asked() -> None:
    """A thousand small gradients after a large one vanish in bf16 and add up in fp32."""

    def total(precision: zeroshard.Precision, stage: int) -> float:
        model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        model, optimizer = zeroshard.shard(
            model, torch.optim.SGD(model.parameters(), lr=1.0), stage=stage, precision=precision
        )
        for scale in (256.0, *([1.0] * 64)):
            (model(torch.ones(1, 1)) * scale).sum().backward()
        optimizer.step()
        return 1.0 - float(zeroshard.full_state_dict(model)["0.weight"])

    for stage in (0, 1, 2, 3):
        exact = zeroshard.Precision(parameters=torch.bfloat16)
        coarse = zeroshard.Precision(parameters=torch.bfloat16, accumulate=torch.bfloat16)
        assert total(exact, stage) == pytest.approx(320, rel=0.01)
        assert total(coarse, stage) == pytest.approx(256, rel=0.01)


@on_ranks(2)
def test_a_step_whose_every_backward_was_in_no_sync_still_reduces() -> None:
    for stage in (0, 1, 2, 3):
        model = net()
        model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
        with zeroshard.no_sync(model):
            loss_of(model, 0).backward()
        optimizer.step()
        plain = net()
        ddp = DistributedDataParallel(plain)
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        loss_of(ddp, 0).backward()
        other.step()
        for name, value in zeroshard.full_state_dict(model).items():
            assert torch.equal(value, plain.state_dict()[name])


@on_ranks(2)
def test_evaluation_in_the_middle_of_accumulation_changes_nothing() -> None:
    for stage in (0, 1, 2, 3):
        model = net()
        quiet = accumulate(
            *zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), stage=stage), delay=False
        )
        model = net()
        model, optimizer = zeroshard.shard(
            model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), stage=stage
        )
        for step in range(3):
            for micro in range(MICRO_BATCHES):
                (loss_of(model, 10 * step + micro) / MICRO_BATCHES).backward()
                model.eval()
                with torch.no_grad():
                    loss_of(model, 77)
                model.train()
            optimizer.step()
            optimizer.zero_grad()
        for name, value in zeroshard.full_state_dict(model).items():
            assert torch.equal(value, quiet[name])


@on_ranks(2)
def test_a_backward_twice_through_one_graph_accumulates() -> None:
    for stage in (0, 1, 2, 3):
        model = net()
        model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
        loss = loss_of(model, 0)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        other = net()
        other, double = zeroshard.shard(other, torch.optim.SGD(other.parameters(), lr=0.1), stage=stage)
        (2 * loss_of(other, 0)).backward()
        double.step()
        theirs = zeroshard.full_state_dict(other)
        for name, value in zeroshard.full_state_dict(model).items():
            torch.testing.assert_close(value, theirs[name])
