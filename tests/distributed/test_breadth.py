"""Layers, hooks and loops that people have: each trains in every stage as under DDP, or is refused and named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import zeroshard
from tests.comparison import assert_equal_states, assert_trains_as_ddp, run, trained_with_ddp
from tests.models import Block, Net, batch, loss_of, net
from tests.ranks import on_ranks
from tests.training import STAGES, adamw, sgd

WIDTH = 13


class Around(nn.Module):
    """A root (first, last) around two blocks of a kind."""

    def __init__(self, block: Callable[[], nn.Module], width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(7, width)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.last = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


# -- layers -----------------------------------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    """``nn.MultiheadAttention`` reads the weights of its output layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x[None], x[None], x[None])[0][0]


class Recurrent(nn.Module):
    """Recurrent layers keep a list of their weights besides the attributes, and may flatten it."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.flatten_parameters()
        return self.layer(x[:, None])[0][:, 0]


class Listed(nn.Module):
    """Parameters in containers that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(2))
        self.named = nn.ParameterDict({"scale": torch.ones(WIDTH), "shift": torch.zeros(())})

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.several:
            x = torch.tanh(x @ matrix)
        return x * self.named["scale"] + self.named["shift"]


class Branching(nn.Module):
    """What runs depends on the data and on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        times = int(x.detach().sum().abs() * 1000) % 4
        for number in range(times):
            x = torch.relu(self.ways[(number * 2) % 3](x))
        if dist.get_rank() == 0:
            return x * torch.sigmoid(self.gate(x))
        return x


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Around(SelfAttention, 12),
    "rnn": lambda: Around(lambda: Recurrent(nn.RNN)),
    "lstm": lambda: Around(lambda: Recurrent(nn.LSTM)),
    "gru": lambda: Around(lambda: Recurrent(nn.GRU)),
    "encoder": lambda: Around(lambda: nn.TransformerEncoderLayer(12, 3, 20), 12),
    "weight norm": lambda: Around(lambda: weight_norm(nn.Linear(WIDTH, WIDTH))),
    "spectral norm": lambda: Around(lambda: spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "lists": lambda: Around(Listed),
    "branches": lambda: Around(Branching),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", LAYERS)
@on_ranks(2)
def test_a_layer_trains_as_under_ddp_in_units_and_in_the_root(name: str) -> None:
    assert_trains_as_ddp(LAYERS[name], loss_of)
    assert_trains_as_ddp(lambda: nn.Sequential(LAYERS[name]()), loss_of, units=["0.last"])


@on_ranks(2)
def test_containers_of_parameters_that_are_repeated_train_as_under_ddp() -> None:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pairs = nn.ModuleList(
                nn.ParameterList([nn.Parameter(torch.randn(7, 7) / 3), nn.Parameter(torch.zeros(7))]) for _ in range(3)
            )
            self.tables = nn.ModuleList(nn.ParameterDict({"scale": torch.ones(7)}) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for (matrix, shift), table in zip(self.pairs, self.tables, strict=True):
                x = torch.tanh(x @ matrix + shift) * table["scale"]
            return x

    assert_trains_as_ddp(Repeated, loss_of)


@on_ranks(2)
def test_an_embedding_keeps_its_padding_row_where_it_is() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, WIDTH, padding_idx=3)
            self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x)
            return x

    def loss(model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        return model(torch.randint(11, (4, 6), generator=generator)).square().mean()

    assert_trains_as_ddp(Embedded, loss)
    torch.manual_seed(0)
    model = Embedded()
    model, optimizer = zeroshard.shard(model, adamw_without_decay(model.parameters()), stage=3)
    run(model, optimizer, loss, 2)
    assert not zeroshard.full_state_dict(model)["embedding.weight"][3].any()


def adamw_without_decay(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)


class Residual(nn.Module):
    def __init__(self, normalise: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(6, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6) if normalise else nn.GroupNorm(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.convolution(x)))


class Images(nn.Module):
    def __init__(self, normalise: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3)
        self.blocks = nn.Sequential(*(Residual(normalise) for _ in range(3)))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def image_loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(4, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
    return model(x).square().mean()


@on_ranks(2)
def test_convolutions_in_channels_last_train_as_under_ddp_within_rounding() -> None:
    assert_trains_as_ddp(lambda: Images(False).to(memory_format=torch.channels_last), image_loss, make=sgd, exact=False)


# -- buffers ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_batch_norm_trains_as_under_ddp_and_keeps_rank_zeros_statistics() -> None:
    """DDP takes rank 0's buffers before every forward, so it is rank 0 that has the ones that count."""
    _, state = trained_with_ddp(lambda: Images(True), image_loss, steps=4, make=sgd)
    counts = [state]
    dist.broadcast_object_list(counts, src=0)
    for stage in STAGES:
        torch.manual_seed(1)
        model = Images(True)
        model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        run(model, optimizer, image_loss, 4)
        with torch.no_grad():
            image_loss(model.eval(), 9)  # DDP's buffers too are equal only after another forward
        assert_equal_states(zeroshard.full_state_dict(model), counts[0], f"stage {stage}")


class Standardised(nn.Module):
    """Uses in training what it keeps in a buffer, so that other buffers on a rank would train another model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(depth=2)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        shifted = x - self.mean
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0).detach()
        self.steps += 1
        return self.net(shifted)


@on_ranks(2)
def test_a_buffer_that_steers_training_is_rank_zeros_on_all_ranks_as_under_ddp() -> None:
    losses, state = trained_with_ddp(Standardised, loss_of, steps=4)
    for stage in STAGES:
        torch.manual_seed(1)
        model = Standardised()
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage)
        assert run(model, optimizer, loss_of, 4) == losses, f"stage {stage}"
        ours = zeroshard.full_state_dict(model)
        parameters = [name for name, _ in model.named_parameters()]
        assert_equal_states({n: ours[n] for n in parameters}, {n: state[n] for n in parameters}, f"stage {stage}")


@on_ranks(2)
def test_batch_norm_evaluates_alike_on_all_ranks() -> None:
    for stage in STAGES:
        torch.manual_seed(1)
        model = Images(True)
        model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        run(model, optimizer, image_loss, 3)
        model.eval()
        x = torch.ones(2, 3, 8, 8)
        with torch.no_grad():
            mine = model(x)
        others = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(others, mine)
        assert torch.equal(others[0], others[1]), f"stage {stage}"


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [True, False])
@on_ranks(2)
def test_autocast_trains_as_under_ddp(cache: bool) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            output = model(batch(step))
            assert output.dtype is torch.bfloat16
            return output.float().square().mean()

    assert_trains_as_ddp(net, loss)


@on_ranks(2)
def test_autocast_in_evaluation_and_training_by_turns_sees_the_weights_of_now() -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                before = model(batch(90)).float().mean().detach()
            return model(batch(step)).float().square().mean() + before

    assert_trains_as_ddp(net, loss)


@on_ranks(2)
def test_outputs_that_come_from_one_another_are_loss_scaled_once() -> None:
    class Both(Net):
        def forward(self, x: Tensor, both: bool = True) -> Any:
            logits = super().forward(x).float()
            loss = logits.square().mean()
            return {"loss": loss, "logits": logits, "again": (logits, loss)} if both else {"loss": loss}

    scale = zeroshard.LossScale(initial=64.0)
    precision = zeroshard.Precision(parameters=torch.float16, loss_scale=scale)
    for stage in STAGES:
        weights = []
        for both in (False, True):
            torch.manual_seed(1)
            model = Both()
            model, optimizer = zeroshard.shard(
                model, sgd(model.parameters()), stage=stage, precision=precision, clip_grad_norm=1e9
            )
            for step in range(2):
                model(batch(step), both)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
            weights.append(zeroshard.full_state_dict(model))
        assert_equal_states(weights[1], weights[0], f"stage {stage}")


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
    """Leaves a part of what is trained beside its output, as mixtures of experts do with their balance loss."""

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
    """As DDP would, which has no double backward: gradients are averaged by hand."""
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


@on_ranks(2)
def test_the_gradient_of_an_input_alone_is_right_and_trains_nothing() -> None:
    """As for saliency maps and adversarial examples."""
    for stage in STAGES:
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


@on_ranks(2)
def test_functional_call_computes_with_the_given_parameters() -> None:
    torch.manual_seed(5)
    given = {name: torch.randn(value.shape) for name, value in net(depth=2).state_dict().items()}
    expected = torch.func.functional_call(net(depth=2), given, (batch(0),))
    state = {name: value.clone().requires_grad_() for name, value in given.items()}
    for stage in STAGES:
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


@on_ranks(2)
def test_several_losses_with_a_retained_graph_train_as_under_ddp() -> None:
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
    for stage in STAGES:
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


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@on_ranks(2)
def test_hooks_on_blocks_registered_before_or_after_sharding_see_and_change_the_same(before: bool) -> None:
    plain = net(depth=3)
    expected = Hooked(plain)
    run(DistributedDataParallel(plain), sgd(plain.parameters()), loss_of, 3)
    for stage in STAGES:
        model = net(depth=3)
        hooked = Hooked(model) if before else None
        model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        hooked = hooked or Hooked(model)
        run(model, optimizer, loss_of, 3)
        assert hooked.seen == expected.seen, f"stage {stage}"
        assert_equal_states(zeroshard.full_state_dict(model), dict(plain.state_dict()), f"stage {stage}")


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@on_ranks(2)
def test_hooks_before_a_block_may_read_its_parameters(before: bool) -> None:
    def norms(model: Any, seen: list[float]) -> None:
        def read(block: nn.Module, *_: Any) -> None:
            seen.append(float(sum(parameter.detach().norm() for parameter in block.parameters())))

        for block in model.blocks:
            block.register_forward_pre_hook(read)

    plain, expected = net(depth=3), []
    norms(plain, expected)
    run(DistributedDataParallel(plain), sgd(plain.parameters()), loss_of, 2)
    for stage in STAGES:
        model, seen = net(depth=3), []
        if before:
            norms(model, seen)
        model, optimizer = zeroshard.shard(model, sgd(model.parameters()), stage=stage)
        if not before:
            norms(model, seen)
        run(model, optimizer, loss_of, 2)
        assert seen == expected, f"stage {stage}"


@on_ranks(2)
def test_hooks_of_parameters_change_their_gradients_as_in_plain_torch() -> None:
    def hook(model: Any) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    plain = net(depth=2)
    hook(plain)
    run(DistributedDataParallel(plain), sgd(plain.parameters()), loss_of, 2)
    for stage in STAGES:
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


@on_ranks(2)
def test_an_average_of_the_weights_is_kept_through_gathered() -> None:
    """EMA by hand, and torch's ``AveragedModel``, whose copy is made before sharding."""
    averaged = torch.optim.swa_utils.AveragedModel
    rate = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    plain = net(depth=2)
    expected, other = averaged(plain, multi_avg_fn=rate), sgd(plain.parameters())
    ddp = DistributedDataParallel(plain)
    for step in range(3):
        run_step(ddp, other, step)
        expected.update_parameters(plain)
    for stage in STAGES:
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


@on_ranks(2)
def test_a_copy_made_before_sharding_stays_a_plain_model() -> None:
    for stage in STAGES:
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


@pytest.mark.parametrize("name", SCHEDULES)
@on_ranks(2)
def test_an_epoch_loop_with_a_loader_and_a_scheduler_trains_as_under_ddp(name: str) -> None:
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
    for stage in STAGES:
        model = net(depth=2)
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage)
        assert epochs(model, optimizer) == rates
        assert_equal_states(zeroshard.full_state_dict(model), dict(plain.state_dict()), f"stage {stage}")
