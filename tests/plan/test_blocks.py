"""A few blocks of each kind stand for all of them: which blocks are taken, and that the trace is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.plan.architectures import configuration
from tests.plan.traces import trace, trace_every_block
from zeroshard.config.job import ModelConfig
from zeroshard.config.options import Activations
from zeroshard.plan.model import gpt as gpts
from zeroshard.plan.model.blocks import FEW, Sample, take_sample
from zeroshard.plan.model.gpt import from_config
from zeroshard.plan.model.huggingface import Configuration, from_configuration
from zeroshard.plan.model.trace import Trace
from zeroshard.plan.setup import Setup
from zeroshard.train.gpt import GPT

TOKENS = torch.zeros(2, 32, dtype=torch.long, device="meta")


class Layer(nn.Module):
    """A block of a kind, which knows its number."""

    def __init__(self, number: int = 0, *, window: int | None = None, width: int = 16) -> None:
        super().__init__()
        self.layer_idx, self.window = number, window
        self.first, self.second = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return x + self.second(hidden.relu() if self.window is None else hidden.sin().cos())


class Stack(nn.Module):
    """Blocks in a list, with something before and after them."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(50, 16), nn.ModuleList(layers), nn.Linear(16, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sample_of(layers: list[Layer], first: int = 2) -> Sample:
    with torch.device("meta"):
        model = Stack(layers)
    taken = take_sample(model, layers, first)
    assert list(model.layers) == [layers[number] for number in taken.traced], "the others are gone"
    return taken


def test_equal_blocks_are_traced_at_both_ends() -> None:
    taken = sample_of([Layer(number) for number in range(20)])
    assert taken.traced == (0, 1, 19)
    assert taken.stands_for == (0, *[1] * 18, 2)


def test_as_many_blocks_stay_in_front_as_are_asked_for() -> None:
    taken = sample_of([Layer(number) for number in range(20)], first=4)
    assert taken.traced == (0, 1, 2, 3, 19)
    assert taken.stands_for == (0, 1, 2, *[3] * 16, 4)


def test_few_blocks_stay_as_they_are() -> None:
    assert sample_of([Layer(number) for number in range(FEW)]) == Sample.whole(FEW)
    assert len(sample_of([Layer(number) for number in range(FEW + 1)]).traced) == 3


def test_kinds_that_alternate_are_each_traced_at_both_ends() -> None:
    """As in models whose every sixth layer looks at all tokens, and the others at a window."""
    windows = [None if number % 6 == 5 else 64 for number in range(24)]
    taken = sample_of([Layer(number, window=window) for number, window in enumerate(windows)])
    assert taken.traced == (0, 1, 5, 11, 22, 23)
    for number, place in enumerate(taken.stands_for):
        assert windows[taken.traced[place]] == windows[number]
    assert [taken.traced[place] for place in taken.stands_for[:7]] == [0, 1, 1, 1, 1, 5, 1]


def test_a_number_that_differs_in_all_blocks_is_their_place_and_one_that_repeats_is_a_kind() -> None:
    numbered = [Layer(number, window=1000 + number) for number in range(12)]
    assert len(sample_of(numbered).traced) == 3
    in_pairs = [Layer(number, window=number // 2) for number in range(12)]
    assert sample_of(in_pairs) == Sample.whole(12)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "window", 3),
        lambda layer: setattr(layer, "flag", True),
        lambda layer: layer.first.requires_grad_(False),
        lambda layer: layer.register_buffer("more", torch.zeros(2)),
        lambda layer: layer.double(),
        lambda layer: layer.add_module("drop", nn.Dropout()),
        lambda layer: setattr(layer, "first", nn.Linear(16, 16, bias=False)),
        lambda layer: layer.eval(),
    ],
)
def test_a_block_that_differs_in_anything_is_traced_by_itself(change: Callable[[Layer], Any]) -> None:
    layers = [Layer(number) for number in range(12)]
    change(layers[6])
    taken = sample_of(layers)
    assert taken.traced == (0, 1, 6, 11)
    assert taken.stands_for == (*(0, 1, 1, 1, 1, 1), 2, *(1, 1, 1, 1), 3)


def test_blocks_of_two_containers_are_never_of_one_kind() -> None:
    with torch.device("meta"):
        first, second = ([Layer(number) for number in range(10)] for _ in range(2))
        model = nn.ModuleList([Stack(first), Stack(second)])
    taken = take_sample(model, [*first, *second], 2)
    assert taken.traced == (0, 1, 9, 10, 11, 19)
    assert [len(stack.layers) for stack in model] == [3, 3]  # type: ignore[arg-type]


def test_a_block_that_is_in_two_containers_stays() -> None:
    with torch.device("meta"):
        layers = [Layer(number) for number in range(12)]
        model = nn.ModuleList([Stack(layers), nn.Sequential(*layers)])
    assert take_sample(model, layers, 2) == Sample.whole(12)
    assert [len(list(part.children())) for part in model][1] == 12


# -- the trace is that of all blocks ----------------------------------------------------------------------------------


def close(seen: Trace, expected: Trace, apart: int = 0) -> None:
    """Sizes are equal to the byte, and FLOPs up to rounding. ``apart``: bytes by which sizes in backward may differ."""
    assert seen.units == expected.units
    assert seen.buffers == expected.buffers
    for name, size in vars(expected.activations).items():
        bound = apart if "backward" in name or name == "depositing" else 0
        assert getattr(seen.activations, name) == pytest.approx(size, rel=0, abs=bound), name
    assert seen.forward_flops == pytest.approx(expected.forward_flops)
    assert seen.matrix_flops == pytest.approx(expected.matrix_flops)
    assert seen.forward_written[1:] == pytest.approx(expected.forward_written[1:])
    assert seen.stream == expected.stream
    assert (seen.checkpoints, seen.gathered_checkpoints) == (expected.checkpoints, expected.gathered_checkpoints)
    assert (seen.logits, seen.recomputes) == (expected.logits, expected.recomputes)
    assert seen.work is not None
    assert expected.work is not None
    assert seen.work.product == pytest.approx(expected.work.product)


WAYS: dict[str, Activations | None] = {
    "saved": None,
    "recomputed": Activations(),
    "on the host": Activations(offload=True),
    "fetched early": Activations(offload=True, prefetch=3),
}
STACKS: dict[str, Callable[[], list[Layer]]] = {
    "equal": lambda: [Layer(number) for number in range(12)],
    "a window in five of six": lambda: [Layer(number, window=None if number % 6 == 5 else 64) for number in range(18)],
    "turn about": lambda: [Layer(number, window=number % 2 or None, width=32) for number in range(13)],
    "wide at the end": lambda: [Layer(number, width=16 if number < 12 else 64) for number in range(14)],
    "wide at the start": lambda: [Layer(number, width=64 if number < 2 else 16) for number in range(14)],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stack", STACKS)
def test_a_few_blocks_give_the_trace_of_all_blocks(stack: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def seen() -> Trace:
        return trace(lambda: Stack(STACKS[stack]()), (TOKENS,), activations=WAYS[way])

    few = seen()
    trace_every_block(monkeypatch)
    every = seen()
    assert len(set(few.kinds)) < len(set(every.kinds))
    close(few, every)
    assert few.backward_ratio == pytest.approx(every.backward_ratio, rel=1e-3)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma3_text", "mixtral"])
@pytest.mark.parametrize("way", ["saved", "recomputed"])
def test_a_few_blocks_of_a_hugging_face_model_give_the_trace_of_all_blocks(
    kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {"gpt2": "n_layer"}.get(kind, "num_hidden_layers")
    values = configuration(kind, **{layers: 12, "use_cache": False})
    setup = Setup(stage=0, batch=2, sequence=32, checkpointing=WAYS[way] is not None, activations=WAYS[way])

    def seen(where: str) -> Trace:
        return from_configuration(Configuration(kind, values), where).trace(setup)

    few = seen("few")
    trace_every_block(monkeypatch)
    every = seen("every")  # models of two files share no traces
    assert len(set(few.kinds)) < len(set(every.kinds))
    # Layers of two types have two tables of angles. Each is freed where backward leaves the first layer of its type.
    close(few, every, apart=2 * 32 * 48 * 2 if kind == "gemma3_text" else 0)


@pytest.mark.parametrize("way", [None, Activations(offload=True, prefetch=2)])
@pytest.mark.parametrize(("degree", "limit"), [(1, 1 << 30), (2, 1 << 30), (1, 200_000)])
def test_a_deep_gpt_of_which_a_few_layers_are_built_is_traced_as_if_all_were(
    degree: int, limit: int, way: Activations | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(layers=24, hidden=128, heads=4, sequence=64, vocabulary=300)
    setup = Setup(stage=3, batch=2, sequence=64, model_parallel=degree, activations=way, max_unit_bytes=limit)
    few = from_config(config).trace(setup)
    trace_every_block(monkeypatch)
    monkeypatch.setattr(gpts, "BUILT", 1 << 20)
    every = from_config(config).trace(setup)
    assert (len(set(few.kinds)) < 20) < len(set(every.kinds))
    close(few, every)


def test_a_model_that_cannot_run_with_a_few_of_its_blocks_is_traced_with_all() -> None:
    class Picky(Stack):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for number in range(12):
                x = self.layers[number](x)
            return self.head(x)

    picky = trace(lambda: Picky(STACKS["equal"]()), (TOKENS,))
    assert picky.kinds == tuple(range(13))
    close(picky, trace(lambda: Stack(STACKS["equal"]()), (TOKENS,)))


def test_blocks_that_do_not_run_count_for_nothing_however_many_there_are() -> None:
    class First(Stack):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers[:2]:
                x = layer(x)
            return self.head(x)

    many = trace(lambda: First([Layer(number) for number in range(24)]), (TOKENS,))
    few = trace(lambda: First([Layer(number) for number in range(FEW)]), (TOKENS,))
    assert many.activations.saved == few.activations.saved
    assert sum(many.forward_flops) == sum(few.forward_flops)


def test_the_gpt_of_a_preset_is_built_with_few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    original = GPT.__init__

    def counting(self: GPT, config: ModelConfig, **more: Any) -> None:
        built.append(config.layers)
        original(self, config, **more)

    monkeypatch.setattr(GPT, "__init__", counting)
    config = ModelConfig(layers=400, hidden=192, heads=3, sequence=32, vocabulary=310)
    assert from_config(config).parameters == config.parameters
    assert max(built) <= FEW + 1


class Numbered(nn.Module):
    """A model whose forward treats blocks by their number."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers, self.way = nn.ModuleList(Layer() for _ in range(20)), way

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for number, layer in enumerate(self.layers):
            x = layer(torch.cat([x, x]))[: len(x)] if self.way == "alternate" and number % 2 else layer(x)
            kept.append(x)
        return torch.stack(kept).sum() if self.way == "keep" else x.sum()


@pytest.mark.parametrize("way", ["keep", "alternate"])
@pytest.mark.parametrize("activations", [None, Activations()], ids=["saved", "recomputed"])
def test_blocks_that_forward_treats_by_their_number_are_all_traced(
    way: str, activations: Activations | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = trace(lambda: Numbered(way), (torch.zeros(64, 16),), activations=activations)
    trace_every_block(monkeypatch)
    close(seen, trace(lambda: Numbered(way), (torch.zeros(64, 16),), activations=activations))
