"""Hooks of the user, and what surrounds training in the loops that people have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.comparison import assert_equal_states, run
from tests.matrix import Stages, in_stages
from tests.models import batch, loss_of, net
from tests.ranks import on_ranks
from tests.training import adamw, sgd

# -- hooks of the user ------------------------------------------------------------------------------------------------


class Hooked:
    """Every kind of hook on the blocks; what they saw."""

    def __init__(self, model: Any) -> None:
        self.seen: list[tuple[str, float]] = []
        for block in model.blocks:
            block.register_forward_pre_hook(self.before)
            block.register_forward_hook(self.after)
            block.register_full_backward_pre_hook(self.before_backward)
            block.register_full_backward_hook(self.after_backward)

    def before(self, block: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        self.seen.append(("before", args[0].sum().item()))
        return (args[0] * 1.5,)

    def after(self, block: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        self.seen.append(("after", output.sum().item()))
        return output + 0.25

    def before_backward(self, block: nn.Module, gradients: tuple[Tensor]) -> tuple[Tensor]:
        self.seen.append(("before backward", gradients[0].sum().item()))
        return (gradients[0] * 0.5,)

    def after_backward(self, block: nn.Module, inputs: tuple[Tensor], outputs: tuple[Tensor]) -> tuple[Tensor]:
        self.seen.append(("after backward", inputs[0].sum().item()))
        return (inputs[0] * 2,)


@in_stages
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@on_ranks(2)
def test_hooks_on_blocks_registered_before_or_after_sharding_see_and_change_the_same(
    stages: Stages, before: bool
) -> None:
    plain = net(depth=3)
    expected = Hooked(plain)
    run(DistributedDataParallel(plain), sgd(plain.parameters()), loss_of, 3)
    for stage in stages:
        model = net(depth=3)
        hooked = Hooked(model) if before else None
        model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        hooked = hooked or Hooked(model)
        run(model, optimizer, loss_of, 3)
        assert hooked.seen == expected.seen, f"stage {stage}"
        assert_equal_states(zeroshard.full_state_dict(model), dict(plain.state_dict()), f"stage {stage}")


@in_stages
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@on_ranks(2)
def test_hooks_before_a_block_may_read_its_parameters(stages: Stages, before: bool) -> None:
    def norms(model: Any, seen: list[float]) -> None:
        def read(block: nn.Module, *_: Any) -> None:
            seen.append(float(sum(parameter.detach().norm() for parameter in block.parameters())))

        for block in model.blocks:
            block.register_forward_pre_hook(read)

    plain, expected = net(depth=3), []
    norms(plain, expected)
    run(DistributedDataParallel(plain), sgd(plain.parameters()), loss_of, 2)
    for stage in stages:
        model, seen = net(depth=3), []
        if before:
            norms(model, seen)
        model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        if not before:
            norms(model, seen)
        run(model, optimizer, loss_of, 2)
        assert seen == expected, f"stage {stage}"


@in_stages
@on_ranks(2)
def test_hooks_of_parameters_change_their_gradients_as_in_plain_torch(stages: Stages) -> None:
    def hook(model: Any) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    plain = net(depth=2)
    hook(plain)
    run(DistributedDataParallel(plain), sgd(plain.parameters()), loss_of, 2)
    for stage in stages:
        for before in (True, False):
            model = net(depth=2)
            if before:
                hook(model)
            model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
            if not before:
                hook(model)
            run(model, optimizer, loss_of, 2)
            assert_equal_states(
                zeroshard.full_state_dict(model), dict(plain.state_dict()), f"stage {stage}, before={before}"
            )


# -- what surrounds training ------------------------------------------------------------------------------------------


@in_stages
@on_ranks(2)
def test_an_average_of_the_weights_is_kept_through_gathered(stages: Stages) -> None:
    """EMA by hand, and torch's ``AveragedModel``, whose copy is made before sharding."""
    averaged = torch.optim.swa_utils.AveragedModel
    rate = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    plain = net(depth=2)
    expected, other = averaged(plain, multi_avg_fn=rate), sgd(plain.parameters())
    ddp = DistributedDataParallel(plain)
    for step in range(3):
        run_step(ddp, other, step)
        expected.update_parameters(plain)
    for stage in stages:
        model = net(depth=2)
        average = averaged(model, multi_avg_fn=rate)
        model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        by_hand: dict[str, Tensor] = {}
        for step in range(3):
            run_step(model, optimizer, step)
            with zeroshard.gathered(model), torch.no_grad():
                average.update_parameters(model)
                for name, parameter in model.named_parameters():
                    by_hand[name] = torch.lerp(by_hand.get(name, parameter), parameter, 0.1)
        assert_equal_states(dict(average.state_dict()), dict(expected.state_dict()), f"stage {stage}")
        for name, value in by_hand.items():
            torch.testing.assert_close(value, expected.module.get_parameter(name).data)


def run_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


@in_stages
@on_ranks(2)
def test_a_copy_made_before_sharding_stays_a_plain_model(stages: Stages) -> None:
    for stage in stages:
        model = net(depth=2)
        teacher = copy.deepcopy(model)
        model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        for step in range(2):
            (model(batch(step)) - teacher(batch(step)) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_equal_states(dict(teacher.state_dict()), dict(net(depth=2).state_dict()), f"stage {stage}")
        assert not torch.equal(zeroshard.full_state_dict(model)["last.bias"], teacher.last.bias)
        copy.deepcopy(teacher).to(torch.float64)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=9),
    "warm-up": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=4),
        ],
        milestones=[2],
    ),
}


@in_stages
@pytest.mark.parametrize("name", SCHEDULES)
@on_ranks(2)
def test_an_epoch_loop_with_a_loader_and_a_scheduler_trains_as_under_ddp(stages: Stages, name: str) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(22, 7, generator=torch.Generator().manual_seed(3)))

    def epochs(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        sampler: Any = torch.utils.data.DistributedSampler(data, seed=4)
        loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)  # 3 batches, the last of 3
        scheduler = SCHEDULES[name](optimizer)
        rates = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            model.train()
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if name != "plateau":
                    scheduler.step()
                rates.append(optimizer.param_groups[0]["lr"])
            model.eval()
            with torch.no_grad():
                score = sum(model(x).square().mean() for (x,) in loader)
            if name == "plateau":
                dist.all_reduce(score)
                scheduler.step(score)
        return rates

    plain = net(depth=2)
    rates = epochs(DistributedDataParallel(plain), adamw(plain.parameters()))
    assert len(set(rates)) > 1
    for stage in stages:
        model = net(depth=2)
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage)
        assert epochs(model, optimizer) == rates
        assert_equal_states(zeroshard.full_state_dict(model), dict(plain.state_dict()), f"stage {stage}")
