"""``torch.compile`` of the blocks: compiled before or after ``shard()``, in place or wrapped, results are the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.comparison import assert_equal_states, run
from tests.matrix import Stages, in_stages, matrix
from tests.models import Net, loss_of, net
from tests.ranks import on_ranks
from tests.training import STAGES, adamw
from zeroshard import Activations

Compile = Callable[[Net, Any], None]
STEPS = 3


def in_place(model: Net, backend: Any) -> None:
    for block in model.blocks:
        block.compile(backend=backend)


def wrapped(model: Net, backend: Any) -> None:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend)


def plain_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


def trained_plainly() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = net(depth=3)
    losses = run(DistributedDataParallel(model), adamw(model.parameters()), loss_of, STEPS)
    return losses, dict(model.state_dict())


@in_stages
@matrix(compile_blocks=(in_place, wrapped), before=(True, False))
@on_ranks(2)
def test_compiled_blocks_train_as_plain_ones_under_ddp(stages: Stages, compile_blocks: Compile, before: bool) -> None:
    losses, state = trained_plainly()
    for stage in stages:
        torch.compiler.reset()
        model = net(depth=3)
        if before:
            compile_blocks(model, "aot_eager")
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage)
        if not before:
            compile_blocks(model, "aot_eager")
        assert run(model, optimizer, loss_of, STEPS) == pytest.approx(losses, rel=1e-5), stage
        assert_equal_states(plain_names(zeroshard.full_state_dict(model)), state, f"stage {stage}", exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@on_ranks(2)
def test_compiled_blocks_evaluate_between_steps_and_see_new_weights(before: bool) -> None:
    for stage in STAGES:
        torch.compiler.reset()
        model, plain = net(depth=3), net(depth=3)
        if before:
            wrapped(model, "aot_eager")
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage)
        if not before:
            wrapped(model, "aot_eager")
        for step in range(3):
            plain.load_state_dict(plain_names(zeroshard.full_state_dict(model)))
            with torch.no_grad():
                torch.testing.assert_close(loss_of(model, 50), loss_of(plain, 50), msg=f"stage {stage}, step {step}")
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow
@on_ranks(2)
def test_blocks_that_are_compiled_before_and_checkpointed_train_as_plain_ones() -> None:
    losses, state = trained_plainly()

    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.last(x)

    for stage in STAGES:
        torch.compiler.reset()
        torch.manual_seed(1)
        model = Checkpointed(depth=3)
        wrapped(model, "aot_eager")
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage)
        assert run(model, optimizer, loss_of, STEPS) == pytest.approx(losses, rel=1e-5)
        assert_equal_states(plain_names(zeroshard.full_state_dict(model)), state, f"stage {stage}", exact=False)


@pytest.mark.slow
@matrix(compile_blocks=(in_place, wrapped), before=(True, False))
@on_ranks(2)
def test_a_block_is_one_graph_that_is_compiled_once_for_all_blocks_and_steps(
    compile_blocks: Compile, before: bool
) -> None:
    for stage in STAGES:
        torch.compiler.reset()
        graphs: list[list[str]] = []

        def count(graph: torch.fx.GraphModule, inputs: object, graphs: list[list[str]] = graphs) -> Callable[..., Any]:
            graphs.append([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
            return graph.forward

        model = net(depth=3)
        if before:
            compile_blocks(model, count)
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage)
        if not before:
            compile_blocks(model, count)
        run(model, optimizer, loss_of, STEPS)
        assert graphs == [["layer_norm", "linear", "relu", "linear", "add"]], stage


@on_ranks(2)
def test_blocks_that_activations_recomputes_stay_compiled_or_it_is_said() -> None:
    losses, _ = trained_plainly()
    for compile_blocks, before in ((wrapped, True), (wrapped, False), (in_place, True), (in_place, False)):
        torch.compiler.reset()
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, inputs: object, graphs: list[Any] = graphs) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        model = net(depth=3)
        if before:
            compile_blocks(model, keep)
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=2, activations=Activations())
        if not before:
            compile_blocks(model, keep)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert run(model, optimizer, loss_of, STEPS) == pytest.approx(losses, rel=1e-5)
        found = [str(warning.message) for warning in told if "runs uncompiled" in str(warning.message)]
        if compile_blocks is wrapped and before:
            assert len(graphs) == 1
            assert not found
        else:
            assert not graphs
            assert len(found) == 1, "once for all blocks"
            assert "'blocks.0' is compiled around what activations= recomputes" in found[0]


@pytest.mark.slow
@on_ranks(2)
def test_a_whole_model_compiled_after_sharding_trains_as_a_plain_one() -> None:
    losses, state = trained_plainly()
    for stage in STAGES:
        torch.compiler.reset()
        model = net(depth=3)
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage)
        compiled: nn.Module = torch.compile(model, backend="aot_eager")
        assert run(compiled, optimizer, loss_of, STEPS) == pytest.approx(losses, rel=1e-5)
        assert_equal_states(zeroshard.full_state_dict(model), state, f"stage {stage}", exact=False)
