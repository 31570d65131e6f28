"""Layers, their buffers and precisions that people have: each trains in every stage as under DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import zeroshard
from tests.comparison import assert_equal_states, assert_trains_as_ddp, run, trained_with_ddp
from tests.matrix import Stages, in_stages, quick
from tests.models import WIDTH, Around, Block, Net, batch, loss_of, net
from tests.ranks import on_ranks
from tests.training import adamw, sgd

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
@pytest.mark.parametrize("name", quick(LAYERS, "attention", "lstm", "spectral norm", "branches"))
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


@in_stages
@on_ranks(2)
def test_batch_norm_trains_as_under_ddp_and_keeps_rank_zeros_statistics(stages: Stages) -> None:
    """DDP takes rank 0's buffers before every forward, so it is rank 0 that has the ones that count."""
    _, state = trained_with_ddp(lambda: Images(True), image_loss, steps=4, make=sgd)
    counts = [state]
    dist.broadcast_object_list(counts, src=0)
    for stage in stages:
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


@in_stages
@on_ranks(2)
def test_a_buffer_that_steers_training_is_rank_zeros_on_all_ranks_as_under_ddp(stages: Stages) -> None:
    losses, state = trained_with_ddp(Standardised, loss_of, steps=4)
    for stage in stages:
        torch.manual_seed(1)
        model = Standardised()
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage)
        assert run(model, optimizer, loss_of, 4) == losses, f"stage {stage}"
        ours = zeroshard.full_state_dict(model)
        parameters = [name for name, _ in model.named_parameters()]
        assert_equal_states({n: ours[n] for n in parameters}, {n: state[n] for n in parameters}, f"stage {stage}")


@in_stages
@pytest.mark.parametrize("counts", [True, False])
@on_ranks(2)
def test_batch_norm_evaluates_alike_on_all_ranks(stages: Stages, counts: bool) -> None:
    for stage in stages:
        torch.manual_seed(1)
        model = Images(True)
        for module in model.modules():
            if not counts and isinstance(module, nn.BatchNorm2d):
                module.num_batches_tracked = None  # what torch writes to its statistics then leaves no trace
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


@in_stages
@on_ranks(2)
def test_outputs_that_come_from_one_another_are_loss_scaled_once(stages: Stages) -> None:
    class Both(Net):
        def forward(self, x: Tensor, both: bool = True) -> Any:
            logits = super().forward(x).float()
            loss = logits.square().mean()
            return {"loss": loss, "logits": logits, "again": (logits, loss)} if both else {"loss": loss}

    scale = zeroshard.LossScale(initial=64.0)
    precision = zeroshard.Precision(parameters=torch.float16, loss_scale=scale)
    for stage in stages:
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
