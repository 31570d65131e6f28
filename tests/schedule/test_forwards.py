"""Forward passes that do more than map a tensor to a tensor, and uses of autograd other than ``backward()``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.comparison import assert_equal_states, assert_trains_as_ddp, run
from tests.matrix import Stages, in_stages
from tests.models import WIDTH, Around, Block, Net, batch, loss_of, net
from tests.ranks import on_ranks
from tests.training import STAGES, sgd

# -- forward passes that do more than map a tensor to a tensor --------------------------------------------------------


@on_ranks(2)
def test_a_block_may_return_nothing_or_numbers_if_nothing_is_trained_through_it() -> None:
    class Watcher(nn.Module):
        def __init__(self, answer: Any) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 3)
            self.answer = answer

        def forward(self, x: Tensor) -> Any:
            seen = self.layer(x.detach())
            return {"none": None, "int": int(seen.argmax()), "text": "seen"}[self.answer]

    class Watched(Net):
        def __init__(self) -> None:
            super().__init__(WIDTH, 2)
            self.watchers = nn.ModuleList(Watcher(answer) for answer in ("none", "int", "text"))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for watcher, block in zip(self.watchers, [*self.blocks, self.blocks[0]], strict=True):
                watcher(x)
                x = block(x)
            return self.last(x)

    assert_trains_as_ddp(Watched, loss_of)


class Aside(nn.Module):
    """Leaves a part of the loss in an attribute, as mixtures of experts do with their balance loss."""

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.layer, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.returns = returns
        self.balance: Tensor

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.layer(x))
        self.balance = torch.relu(self.router(torch.relu(self.router.weight.new_ones(1) * x))).square().mean()
        return y if self.returns else None


class WithAside(nn.Module):
    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(Aside(returns) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            y = block(x)
            x = x if y is None else x + y
        balances = torch.stack([block.balance for block in self.blocks])
        return x.square().mean() + balances.sum()


@pytest.mark.parametrize("returns", [True, False])
@on_ranks(2)
def test_a_loss_that_a_block_leaves_beside_its_output_is_trained_with(returns: bool) -> None:
    assert_trains_as_ddp(lambda: WithAside(returns), lambda model, step: model(batch(step)))


@on_ranks(2)
def test_a_block_may_return_an_object_of_its_own_class() -> None:
    class Carrier:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    class Carrying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(WIDTH)

        def forward(self, carrier: Carrier) -> Carrier:
            return Carrier(self.block(carrier.x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(7, WIDTH)
            self.blocks = nn.ModuleList(Carrying() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            carrier = Carrier(self.first(x))
            for block in self.blocks:
                carrier = block(carrier)
            return carrier.x

    assert_trains_as_ddp(Model, loss_of)


@on_ranks(2)
def test_a_block_that_passes_a_tensor_through_is_not_taken_for_its_maker() -> None:
    class Passing(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.block = Block(WIDTH)
            self.bias = nn.Embedding(6, WIDTH) if first else None

        def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            if self.bias is not None:
                bias = self.bias(torch.arange(6))
            return self.block(x + bias), bias

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(7, WIDTH)
            self.blocks = nn.ModuleList(Passing(number == 0) for number in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x, bias = self.first(x), None
            for block in self.blocks:
                x, bias = block(x, bias)
            return x

    assert_trains_as_ddp(Biased, loss_of)


# -- autograd beyond backward() ---------------------------------------------------------------------------------------


def penalised(model: nn.Module, step: int) -> Tensor:
    """The loss of a critic with a gradient penalty: a second backward through the first."""
    x = batch(step).requires_grad_()
    output = model(x).square().sum()
    (slope,) = torch.autograd.grad(output, x, create_graph=True)
    return output + (slope.norm(dim=1) - 1).square().mean()


def smooth() -> nn.Module:
    return Around(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))


def trained_plainly_with(loss: Any, build: Any, steps: int = 3) -> dict[str, Tensor]:
    """What DDP would do if it supported double backward: gradients are averaged by hand."""
    torch.manual_seed(1)
    model = build()
    optimizer = sgd_small(model.parameters())
    for step in range(steps):
        loss(model, step).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def sgd_small(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_gradient_penalty_is_that_of_plain_torch(stage: int) -> None:
    expected = trained_plainly_with(penalised, smooth)
    torch.manual_seed(1)
    model = smooth()
    model, optimizer = zeroshard.shard(model, sgd_small(model.parameters()), stage=stage)
    run(model, optimizer, penalised, 3)
    assert_equal_states(zeroshard.full_state_dict(model), expected, f"stage {stage}", exact=False)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_forces_from_a_gradient_inside_forward_are_those_of_plain_torch(stage: int) -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = smooth()

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            (force,) = torch.autograd.grad(self.inner(x).sum(), x, create_graph=True)
            return force

    expected = trained_plainly_with(loss_of, Forces)
    torch.manual_seed(1)
    model = Forces()
    model, optimizer = zeroshard.shard(model, sgd_small(model.parameters()), stage=stage)
    run(model, optimizer, loss_of, 3)
    assert_equal_states(zeroshard.full_state_dict(model), expected, f"stage {stage}", exact=False)


@in_stages
@on_ranks(2)
def test_the_gradient_of_an_input_alone_is_right_and_trains_nothing(stages: Stages) -> None:
    """As for saliency maps and adversarial examples."""
    for stage in stages:
        model, plain = net(depth=2), net(depth=2)
        model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        other = sgd(plain.parameters())
        ddp = DistributedDataParallel(plain)
        for step in range(3):
            x = batch(50 + step).requires_grad_()
            plain.load_state_dict(zeroshard.full_state_dict(model))
            slopes = [torch.autograd.grad(each(x).sum(), x)[0] for each in (model, plain)]
            assert torch.equal(*slopes), f"stage {stage}"
            for each, each_optimizer in ((model, optimizer), (ddp, other)):
                loss_of(each, step).backward()
                each_optimizer.step()
                each_optimizer.zero_grad()
            assert_equal_states(zeroshard.full_state_dict(model), dict(plain.state_dict()), f"stage {stage}")
        assert zeroshard.stats(model).steps == 3


@in_stages
@on_ranks(2)
def test_functional_call_computes_with_the_given_parameters(stages: Stages) -> None:
    torch.manual_seed(5)
    given = {name: torch.randn(value.shape) for name, value in net(depth=2).state_dict().items()}
    expected = torch.func.functional_call(net(depth=2), given, (batch(0),))
    state = {name: value.clone().requires_grad_() for name, value in given.items()}
    for stage in stages:
        model = net(depth=2)
        model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        before = zeroshard.full_state_dict(model)
        assert torch.equal(torch.func.functional_call(model, given, (batch(0),)), expected), f"stage {stage}"
        torch.func.functional_call(model, state, (batch(0),)).sum().backward()
        assert all(value.grad is not None for value in state.values())
        assert all(parameter.grad is None for parameter in model.parameters())
        optimizer.zero_grad()
        assert_equal_states(zeroshard.full_state_dict(model), before, f"stage {stage}")


@on_ranks(2)
def test_saved_tensors_may_be_packed_and_offloaded_by_the_user() -> None:
    def on_cpu(model: nn.Module, step: int) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return loss_of(model, step)

    def in_numpy(model: nn.Module, step: int) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
            return loss_of(model, step)

    assert_trains_as_ddp(net, on_cpu)
    assert_trains_as_ddp(net, in_numpy)


@in_stages
@on_ranks(2)
def test_several_losses_with_a_retained_graph_train_as_under_ddp(stages: Stages) -> None:
    """Two heads, two backwards through one trunk, gradients summed."""

    class Heads(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x), x

    torch.manual_seed(1)
    plain = Heads(depth=2)
    other = sgd(plain.parameters())
    for step in range(3):
        one, two = plain(batch(step))
        (one.square().mean() + two.mean()).backward()
        for parameter in plain.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        other.step()
        other.zero_grad()
    for stage in stages:
        torch.manual_seed(1)
        model = Heads(depth=2)
        model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        for step in range(3):
            one, two = model(batch(step))
            one.square().mean().backward(retain_graph=True)
            two.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_equal_states(zeroshard.full_state_dict(model), dict(plain.state_dict()), f"stage {stage}", exact=False)
