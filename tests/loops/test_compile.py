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
from tests.matrix import Stages, in_stages, matrix, slow
from tests.models import WIDTH, Around, Net, batch, loss_of, net
from tests.ranks import on_ranks
from tests.training import STAGES, adamw, weights
from zeroshard import Activations
from zeroshard.runtime import runtime_of

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
    """A backend that runs graphs as they are, notes their operations, and counts how often a block runs."""

    def __init__(self) -> None:
        self.operations: list[list[str]] = []
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        operations = [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]
        self.operations.append(operations)

        def run_graph(*inputs: Tensor) -> Any:
            self.runs += operations == BLOCK
            return graph.forward(*inputs)

        return run_graph


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
@matrix(together=1, compile_=WAYS, before=(True, False), activations=RECOMPUTED, offload=(None, "cpu"))
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


@pytest.mark.filterwarnings(LOOP)
@in_stages
@matrix(together=1, compile_=WAYS, before=(True, False), activations=(None, Activations()), offload=(None, "cpu"))
@on_ranks(2)
def test_a_block_is_one_graph_compiled_once_for_all_blocks_and_steps(
    stages: Stages, compile_: Compile, before: bool, activations: Activations | None, offload: str | None
) -> None:
    for stage in stages:
        graphs = Graphs()
        options = {"backend": graphs, **({"fullgraph": True} if compile_ in BLOCKS else {})}
        ours = {"stage": stage, "activations": activations, "offload": offload}
        _, called, optimizer = sharded(net(depth=DEPTH), compile_, before=before, options=options, **ours)
        run(called, optimizer, loss_of, 1)
        first = len(graphs.operations)
        assert graphs.operations.count(BLOCK) == 1, stage
        assert compile_ not in BLOCKS or first == 1
        run(called, optimizer, loss_of, STEPS)
        assert len(graphs.operations) == first, f"stage {stage}: compiled again {graphs.operations[first:]}"


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(torch.relu(self.up(x)), 0.3)
        return nn.functional.dropout(self.down(x), 0.3)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@in_stages
@on_ranks(2)
def test_dropout_in_a_compiled_block_is_the_same_when_the_block_is_recomputed(stages: Stages, backend: str) -> None:
    for stage in stages:
        results = []
        for activations in RECOMPUTED:
            torch.manual_seed(1)
            model, called, optimizer = sharded(
                Around(Dropping),
                blocks_in_place,
                before=False,
                options={"backend": backend, "fullgraph": True},
                stage=stage,
                activations=activations,
            )
            results.append((run(called, optimizer, loss_of, STEPS), plain_names(weights(model))))
        for losses, state in results[1:]:
            assert losses == results[0][0]
            assert_equal_states(state, results[0][1], f"stage {stage}, {backend}")


@pytest.mark.filterwarnings(LOOP)
@in_stages
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("compile_", [blocks_in_place, *map(slow, (blocks_wrapped, model_in_place, model_wrapped))])
@on_ranks(2)
def test_evaluation_between_steps_sees_new_weights(stages: Stages, compile_: Compile, before: bool) -> None:
    for stage in stages:
        ours = {"stage": stage, "activations": Activations()}
        plain, options = net(depth=3), {"backend": "aot_eager"}
        model, called, optimizer = sharded(net(depth=3), compile_, before=before, options=options, **ours)
        for step in range(3):
            plain.load_state_dict(plain_names(weights(model)))
            with torch.no_grad():
                torch.testing.assert_close(loss_of(called, 50), loss_of(plain, 50), msg=f"stage {stage}, step {step}")
            loss_of(called, step).backward()
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_compiled_blocks_that_the_model_itself_recomputes_train_as_plain_ones() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.last(x)

    def build() -> Checkpointed:
        torch.manual_seed(1)
        return Checkpointed(depth=3)

    losses, state = trained_plainly(build=build)
    for stage in STAGES:
        for compile_ in BLOCKS:
            model, called, optimizer = sharded(
                build(), compile_, before=True, options={"backend": "aot_eager", "fullgraph": True}, stage=stage
            )
            assert run(called, optimizer, loss_of, STEPS) == losses
            assert_equal_states(plain_names(weights(model)), state, f"stage {stage}")


@matrix(activations=(None, Activations()), compile_=WAYS)
@pytest.mark.filterwarnings(LOOP)
@on_ranks(2)
def test_a_block_of_several_units_is_compiled_unit_by_unit(activations: Activations | None, compile_: Compile) -> None:
    losses, state = trained_plainly()
    graphs, of_a_linear_layer = Graphs(), 13 * 39 * 4 + 200
    ours = {"stage": 3, "max_unit_bytes": of_a_linear_layer, "activations": activations}
    model, called, optimizer = sharded(net(depth=3), compile_, before=False, options={"backend": graphs}, **ours)
    assert run(called, optimizer, loss_of, STEPS) == losses
    assert_equal_states(plain_names(weights(model)), state, "stage 3")
    for operation in BLOCK:
        assert [operation] in graphs.operations


@pytest.mark.parametrize("activations", [None, Activations()])
@on_ranks(2)
def test_a_graph_that_would_go_around_a_unit_is_refused_with_the_remedy(activations: Activations | None) -> None:
    whole = {"backend": "eager", "fullgraph": True}
    _, called, _ = sharded(net(depth=2), model_in_place, before=False, options=whole, stage=3, activations=activations)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"for modules that are one unit each"):
        called(batch(0))
    ours = {"stage": 3, "max_unit_bytes": 13 * 39 * 4 + 200, "activations": activations}
    _, called, _ = sharded(net(depth=2), blocks_in_place, before=True, options=whole, **ours)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a larger max_unit_bytes makes it one"):
        called(batch(0))


class Sharing(nn.Module):
    """A block with a layer that all blocks share, so that it belongs to the root unit."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(WIDTH, WIDTH), shared

    def forward(self, x: Tensor) -> Tensor:
        return self.own(torch.relu(self.shared(x)))


@in_stages
@on_ranks(2)
def test_a_block_with_a_layer_of_the_root_is_one_graph(stages: Stages) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        shared = nn.Linear(WIDTH, WIDTH)
        return Around(lambda: Sharing(shared))

    losses, state = trained_plainly(build=build, fullgraph=True)
    for stage in stages:
        for offload in (None, "cpu"):
            ours = {"stage": stage, "activations": Activations(), "offload": offload}
            options = {"backend": "aot_eager", "fullgraph": True}
            model, called, optimizer = sharded(build(), blocks_in_place, before=True, options=options, **ours)
            assert run(called, optimizer, loss_of, STEPS) == pytest.approx(losses, rel=1e-5 if offload else 0)
            assert_equal_states(plain_names(weights(model)), state, f"stage {stage}", exact=offload is None)


@pytest.mark.filterwarnings(LOOP)
@pytest.mark.parametrize("activations", [None, Activations()])
@on_ranks(2)
def test_blocks_are_compiled_as_the_call_is(activations: Activations | None) -> None:
    graphs, again = Graphs(), Graphs()
    model, called, _ = sharded(
        net(depth=2), model_wrapped, before=False, options={"backend": graphs}, stage=3, activations=activations
    )

    def runs_in(forward: nn.Module) -> tuple[int, int]:
        graphs.runs = again.runs = 0
        forward(batch(0)).sum().backward()
        return graphs.runs, again.runs

    runs = 2 if activations is None else 4
    for _ in range(2):
        assert runs_in(model) == (0, 0)
        assert runs_in(called) == (runs, 0)
    for block in model.blocks:
        block.compile(backend=again)
    assert runs_in(model) == runs_in(called) == (0, runs), "a block's own compilation comes first"
    assert graphs.operations.count(BLOCK) == 1
    assert again.operations == [BLOCK]


@on_ranks(2)
def test_what_is_not_compiled_of_a_compiled_model_is_named_once() -> None:
    class Unrolled(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.blocks[1](self.blocks[0](self.first(x) * 2.0)) * 3.0)

    for build, expected in ((Net, 1), (Unrolled, 0)):
        for compile_ in (model_in_place, model_wrapped, function_around):
            graphs = Graphs()
            _, called, optimizer = sharded(
                build(depth=2), compile_, before=False, options={"backend": graphs}, stage=3, activations=Activations()
            )
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                run(called, optimizer, loss_of, 2)
            found = [str(warning.message) for warning in told if "compile" in str(warning.message)]
            assert len(found) == expected, (build, compile_, found, graphs.operations)
            assert all("Net.forward calls blocks in a loop" in text for text in found)
            assert graphs.operations.count(BLOCK) == 1
            root = [name for operations in graphs.operations if operations != BLOCK for name in operations]
            assert ("mul" in root) == (not expected or compile_ is function_around)


@pytest.mark.filterwarnings(LOOP)
@in_stages
@pytest.mark.parametrize("compile_", [blocks_in_place, *map(slow, (blocks_wrapped, model_in_place, model_wrapped))])
@on_ranks(2)
def test_a_graph_may_be_compiled_while_gradients_wait_for_the_step(stages: Stages, compile_: Compile) -> None:
    def accumulated(model: nn.Module, called: nn.Module, optimizer: Any, no_sync: Any) -> list[float]:
        losses = []
        for step in range(2):
            with no_sync(model):
                losses.append(loss_of(model if step == 0 else called, step))
                losses[-1].backward()
            losses.append(called(batch(step + 50, rows=4 + step)).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.item() for loss in losses]

    torch.compiler.reset()
    plain = DistributedDataParallel(net(depth=3))
    compiled = compile_(plain.module, backend="aot_eager")
    around = plain if compiled is plain.module else DistributedDataParallel(compiled)
    expected = accumulated(around, around, adamw(plain.parameters()), lambda model: model.no_sync())
    for stage in stages:
        model, called, optimizer = sharded(
            net(depth=3), compile_, before=False, options={"backend": "aot_eager"}, stage=stage
        )
        assert accumulated(model, called, optimizer, zeroshard.no_sync) == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:Own.forward calls blocks in a loop")
@pytest.mark.parametrize("compile_", WAYS)
@on_ranks(2)
def test_blocks_are_compiled_where_the_model_calls_our_checkpoint(compile_: Compile) -> None:
    class Own(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = zeroshard.checkpoint(block, x)
            return self.last(x)

    def build() -> Own:
        torch.manual_seed(1)
        return Own(depth=3)

    model, optimizer = build(), None
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=3)
    losses = run(model, optimizer, loss_of, STEPS)
    graphs = Graphs()
    options = Activations(recompute=0, offload=True)
    _, called, optimizer = sharded(
        build(), compile_, before=False, options={"backend": graphs}, stage=3, activations=options
    )
    assert run(called, optimizer, loss_of, STEPS) == losses
    assert graphs.operations.count(BLOCK) == 1


@matrix(stage=(2, 3), activations=(None, Activations()))
@on_ranks(2)
def test_gradients_of_compiled_blocks_are_reduced_while_backward_runs(
    stage: int, activations: Activations | None
) -> None:
    options = {"backend": "aot_eager", "fullgraph": True}
    model, called, optimizer = sharded(
        net(depth=6), blocks_in_place, before=True, options=options, stage=stage, activations=activations
    )
    run(called, optimizer, loss_of, 1)
    reduces = runtime_of(model).fabric.reduces.log
    reduced: list[int] = []

    def look(module: nn.Module, inputs: Any, output: Tensor) -> None:
        before = len(reduces)
        output.register_hook(lambda gradient: reduced.append(len(reduces) - before))

    model.first.register_forward_hook(look)
    loss_of(called, 1).backward()
    assert reduced[0] >= 5, "when backward has come through the blocks, all but the first are reduced"
