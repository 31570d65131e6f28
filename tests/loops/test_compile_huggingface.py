"""``torch.compile`` of a Hugging Face model, layer by layer: whole graphs, batches of other shapes, autocast."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.comparison import assert_equal_states
from tests.huggingface import llama, tokens
from tests.matrix import slow
from tests.ranks import on_ranks
from tests.training import STAGES, adamw
from zeroshard import Activations

SIZES = ((3, 9), (3, 9), (2, 7), (3, 9))
"""Rows and length of the batch in each step."""


class Counted:
    """The backend aot_eager, with the number of graphs that it has compiled."""

    def __init__(self) -> None:
        self.graphs = 0
        self._compile = torch._dynamo.lookup_backend("aot_eager")

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return self._compile(graph, inputs)


def compile_layers(model: Any, backend: Counted) -> None:
    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)


def train(model: Any, optimizer: Any, backend: Counted, *, autocast: bool) -> tuple[list[float], list[int]]:
    """Losses, and how many graphs there were after each step."""
    losses, graphs = [], []
    for step, (rows, length) in enumerate(SIZES):
        batch = tokens(step, rows, length)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        graphs.append(backend.graphs)
    return losses, graphs


RECOMPUTED = {"kept": None, "recomputed": Activations(), "on the host": Activations(offload=True)}
CASES = list(product(STAGES, RECOMPUTED, (False, True), (False, True)))


@pytest.mark.parametrize(
    ("stage", "activations", "autocast", "before"),
    [case if case == (3, "recomputed", True, False) else slow(*case) for case in CASES],
)
@on_ranks(2)
def test_layers_are_compiled_as_plain_torch_compiles_them(
    stage: int, activations: str, autocast: bool, before: bool
) -> None:
    torch.manual_seed(1)
    plain, backend = llama(), Counted()
    compile_layers(plain, backend)
    losses, graphs = train(DistributedDataParallel(plain), adamw(plain.parameters()), backend, autocast=autocast)
    assert graphs == [1, 1, 2, 2]
    torch.manual_seed(1)
    model, backend = llama(), Counted()
    if before:
        compile_layers(model, backend)
    model, optimizer = zeroshard.shard(
        model, adamw(model.parameters()), stage=stage, activations=RECOMPUTED[activations]
    )
    if not before:
        compile_layers(model, backend)
    assert train(model, optimizer, backend, autocast=autocast) == (losses, graphs)
    assert_equal_states(zeroshard.full_state_dict(model), dict(plain.state_dict()), f"stage {stage}")
