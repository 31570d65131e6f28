"""DESIGN, invariant 1: every stage trains as DistributedDataParallel does, bit for bit where possible."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.matrix import quick, slow
from tests.models import Net, batch, loss_of, net
from tests.ranks import on_ranks

STAGES = (0, 1, 2, 3)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
}


def train_ddp(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], steps: int = 4) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = make(model.parameters())
    for step in range(steps):
        loss_of(ddp, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def train_sharded(
    model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], steps: int = 4, **options: Any
) -> dict[str, Tensor]:
    model, optimizer = zeroshard.shard(model, make(model.parameters()), **options)
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zeroshard.full_state_dict(model)


def assert_same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, f"differ: {different}"


@pytest.mark.parametrize(
    "name", quick(OPTIMIZERS, "adamw", "adamw foreach", "sgd momentum", "adagrad", "radam", "asgd")
)
@on_ranks(2)
def test_every_stage_is_bitwise_ddp_on_two_ranks_with_every_elementwise_optimizer(name: str) -> None:
    make = OPTIMIZERS[name]
    expected = train_ddp(net(), make)
    for stage in STAGES:
        assert_same_bits(train_sharded(net(), make, stage=stage), expected)


@pytest.mark.parametrize("world", [1, 3, slow(4)])
def test_every_stage_is_ddp_within_rounding_and_stages_agree_bitwise(world: int) -> None:
    from tests.ranks import Pool

    Pool.shared().run(_compare_within_rounding, world, {})


def _compare_within_rounding() -> None:
    make = OPTIMIZERS["sgd momentum"]
    expected = train_ddp(net(), make)
    stages = [train_sharded(net(), make, stage=stage) for stage in STAGES]
    for name, value in expected.items():
        torch.testing.assert_close(stages[0][name], value, rtol=1e-5, atol=1e-6)
    for other in stages[1:]:
        assert_same_bits(other, stages[0])


@on_ranks(2)
def test_clipping_is_bitwise_ddp_given_our_norm_and_the_norm_is_torchs_within_1e6() -> None:
    make = OPTIMIZERS["adamw"]
    norms: dict[int, list[float]] = {}
    weights = {}
    for stage in STAGES:
        model, optimizer = zeroshard.shard(*_built(make), stage=stage, clip_grad_norm=0.5)
        norms[stage] = []
        for step in range(4):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            norm = zeroshard.stats(model).grad_norm
            assert norm is not None
            norms[stage].append(norm)
        weights[stage] = zeroshard.full_state_dict(model)
        assert norms[stage] == norms[0]
        assert_same_bits(weights[stage], weights[0])

    model, optimizer = _built(make)
    ddp = DistributedDataParallel(model)
    for step in range(4):
        loss_of(ddp, step).backward()
        true_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert norms[0][step] == pytest.approx(float(true_norm), rel=1e-6)
        ours = torch.tensor(norms[0][step], dtype=torch.float32)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, ours)
        optimizer.step()
        optimizer.zero_grad()
    assert_same_bits(weights[0], model.state_dict())


@on_ranks(2)
def test_clip_grad_norm_of_the_optimizer_equals_the_option() -> None:
    make = OPTIMIZERS["adamw"]
    for stage in STAGES:
        expected = train_sharded(net(), make, stage=stage, clip_grad_norm=0.5)
        model, optimizer = zeroshard.shard(*_built(make), stage=stage)
        for step in range(4):
            loss_of(model, step).backward()
            norm = optimizer.clip_grad_norm_(0.5)
            assert norm.item() == zeroshard.stats(model).grad_norm
            optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(zeroshard.full_state_dict(model), expected)


@on_ranks(2)
def test_param_groups_keep_their_settings_and_schedulers_built_before_or_after_steer_them() -> None:
    def groups(model: Net) -> torch.optim.Optimizer:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 5e-2}], lr=1e-2)

    def schedulers(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    model = net()
    ddp = DistributedDataParallel(model)
    optimizer = groups(model)
    scheduler = schedulers(optimizer)
    for step in range(4):
        loss_of(ddp, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    expected = {name: value.clone() for name, value in model.state_dict().items()}

    for stage in STAGES:
        for before in (True, False):
            model = net()
            plain = groups(model)
            scheduler = schedulers(plain) if before else None
            model, optimizer = zeroshard.shard(model, plain, stage=stage)
            scheduler = scheduler or schedulers(optimizer)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for step in range(4):
                    loss_of(model, step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
            assert optimizer.param_groups[0]["weight_decay"] == 0.3
            assert_same_bits(zeroshard.full_state_dict(model), expected)


@on_ranks(2)
def test_rank_zeros_parameters_and_buffers_are_taken() -> None:
    for stage in STAGES:
        torch.manual_seed(7 + torch.distributed.get_rank())
        model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        model[1].running_mean.fill_(float(torch.distributed.get_rank()) + 1)
        torch.manual_seed(7)
        zeroth = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        zeroth[1].running_mean.fill_(1.0)
        model, _ = zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=stage)
        assert_same_bits(zeroshard.full_state_dict(model), zeroth.state_dict())


@on_ranks(2)
def test_buffers_made_in_inference_mode_follow_rank_zero_too() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(7, 5)
            self.scale: Tensor
            self.cache: Tensor
            with torch.inference_mode():
                self.register_buffer("scale", torch.full((5,), float(torch.distributed.get_rank() + 1)))
                self.register_buffer("same", self.scale)
                self.register_buffer("cache", torch.zeros(5), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                self.cache = torch.ones(5)
            return self.first(x) * self.scale  # backward needs the scale

    for stage in STAGES:
        model = Scaled()
        scale = model.scale
        model, optimizer = zeroshard.shard(model, torch.optim.SGD(model.parameters()), stage=stage)
        assert model.scale is scale is model.same
        assert scale.eq(1).all()
        with torch.inference_mode():
            model(torch.ones(2, 7))
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        assert not model.cache.is_inference()
        assert model.cache.eq(1).all()


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 2, "precision": "bf16", "offload": "cpu"}])
@on_ranks(1)
def test_a_state_dict_of_the_optimizer_is_not_changed_by_later_steps(options: dict[str, Any]) -> None:
    model = nn.Linear(4, 2)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    model, optimizer = zeroshard.shard(model, optimizer, **options)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not optimizer.state.get("common"):
            optimizer.state["common"] = {"count": torch.zeros(1)}
            taken = optimizer.state_dict()
            before = copy.deepcopy(taken)
        optimizer.state["common"]["count"] += 1
        optimizer.param_groups[0]["lr"] *= 0.5
    for number, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(taken["state"][number][name]), torch.as_tensor(value)), name
    assert torch.equal(taken["param_groups"][0]["lr"], before["param_groups"][0]["lr"])


@on_ranks(2)
def test_state_that_the_optimizer_already_has_is_sharded() -> None:
    make = OPTIMIZERS["adamw"]

    def warmed_up() -> tuple[Net, torch.optim.Optimizer]:
        model, optimizer = _built(make)
        torch.manual_seed(3)
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    model, optimizer = warmed_up()
    ddp = DistributedDataParallel(model)
    for step in range(2):
        loss_of(ddp, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage in STAGES:
        ours, sharded = zeroshard.shard(*warmed_up(), stage=stage)
        for step in range(2):
            loss_of(ours, step).backward()
            sharded.step()
            sharded.zero_grad()
        assert_same_bits(zeroshard.full_state_dict(ours), model.state_dict())


@on_ranks(2)
def test_a_closure_is_evaluated_before_the_update() -> None:
    expected = train_sharded(net(), OPTIMIZERS["sgd momentum"], stage=2)
    model, optimizer = zeroshard.shard(*_built(OPTIMIZERS["sgd momentum"]), stage=2)
    for step in range(4):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return float(loss)

        assert optimizer.step(closure) > 0
    assert_same_bits(zeroshard.full_state_dict(model), expected)


@on_ranks(2)
def test_a_step_between_forward_and_backward_raises_as_in_plain_torch() -> None:
    for stage in STAGES:
        model, optimizer = zeroshard.shard(*_built(OPTIMIZERS["sgd momentum"]), stage=stage)
        first, second = loss_of(model, 0), loss_of(model, 1)
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()


def _built(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[Net, torch.optim.Optimizer]:
    model = net()
    return model, make(model.parameters())


@on_ranks(2)
def test_odd_shapes_scalars_and_empty_parameters_are_sharded() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.nothing = nn.Parameter(torch.empty(0, 3))
            self.blocks = nn.Sequential(nn.Linear(7, 1), nn.Linear(1, 3, bias=False))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x) * self.scale + self.nothing.sum()

    def build() -> Odd:
        torch.manual_seed(0)
        return Odd()

    expected = train_ddp(build(), OPTIMIZERS["adamw"])
    for stage in STAGES:
        assert_same_bits(train_sharded(build(), OPTIMIZERS["adamw"], stage=stage), expected)


@on_ranks(2)
def test_outputs_are_the_unsharded_models() -> None:
    plain = net()
    for stage in STAGES:
        model, _ = zeroshard.shard(*_built(OPTIMIZERS["adamw"]), stage=stage)
        with torch.no_grad():
            assert torch.equal(model(batch(0)), plain(batch(0)))
        with torch.inference_mode():
            assert torch.equal(model(batch(1)), plain(batch(1)))
