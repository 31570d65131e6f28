"""``torch.compile`` in the ways in which people use it: results are those of plain torch, compiled the same way."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.comparison import assert_equal_states, run
from tests.matrix import Stages, in_stages, matrix
from tests.models import WIDTH, Around, Net, batch, loss_of, net
from tests.ranks import on_ranks
from tests.training import STAGES, adamw, weights
from zeroshard import Activations

Compile = Callable[..., nn.Module]
"""Compiles a model, with the options of ``torch.compile``, and returns what the training loop calls."""
STEPS = 3
BLOCK = ["layer_norm", "linear", "relu", "linear", "add"]
"""The operations of a block's graph."""
DEPTH = 10
"""More blocks than torch compiles graphs of one code, 8."""
LOOP = "ignore:Net.forward calls blocks in a loop"


def blocks_in_place(model: nn.Module, **options: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(**options)
    return model


def blocks_wrapped(model: nn.Module, **options: Any) -> nn.Module:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, **options)
    return model


def model_in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


def model_wrapped(model: nn.Module, **options: Any) -> nn.Module:
    return torch.compile(model, **options)


def function_around(model: nn.Module, **options: Any) -> nn.Module:
    class Caller(nn.Module):
        forward = torch.compile(lambda self, x: 1.0 * model(x), **options)

    return Caller()


BLOCKS = (blocks_in_place, blocks_wrapped)
WAYS = (*BLOCKS, model_in_place, model_wrapped)


class Graphs:
    """A backend that runs graphs as they are and notes their operations."""

    def __init__(self) -> None:
        self.operations: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        self.operations.append([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward


def sharded(
    model: nn.Module, compile_: Compile, *, before: bool, options: dict[str, Any], **ours: Any
) -> tuple[nn.Module, nn.Module, Any]:
    """The sharded model, what the loop calls, and the optimizer."""
    torch.compiler.reset()
    called = compile_(model, **options) if before else model
    given = called if isinstance(called, torch._dynamo.OptimizedModule) else model
    model, optimizer = zeroshard.shard(given, adamw(given.parameters()), **ours)
    return model, called if before else compile_(model, **options), optimizer


def plain_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


def trained_plainly(
    compile_: Compile = blocks_in_place, build: Callable[[], nn.Module] = lambda: net(depth=3), **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    torch.compiler.reset()
    model = build()
    called = compile_(model, **{"backend": "aot_eager", **options})
    losses = run(DistributedDataParallel(called), adamw(model.parameters()), loss_of, STEPS)
    return losses, plain_names(dict(model.state_dict()))


RECOMPUTED = (None, Activations(), Activations(offload=True))


@pytest.mark.filterwarnings(LOOP)
@in_stages
@matrix(compile_=WAYS, before=(True, False), activations=RECOMPUTED, offload=(None, "cpu"))
@on_ranks(2)
def test_results_are_those_of_ddp_compiled_the_same_way(
    stages: Stages, compile_: Compile, before: bool, activations: Activations | None, offload: str | None
) -> None:
    losses, state = trained_plainly(compile_)
    for stage in stages:
        model, called, optimizer = sharded(
            net(depth=3),
            compile_,
            before=before,
            options={"backend": "aot_eager"},
            stage=stage,
            activations=activations,
            offload=offload,
        )
        found = run(called, optimizer, loss_of, STEPS)
        exact = offload is None
        assert found == (losses if exact else pytest.approx(losses, rel=1e-5)), stage
        assert_equal_states(plain_names(weights(model)), state, f"stage {stage}", exact=exact)
