"""Activation checkpoints: recomputed, divided among tensor-parallel ranks, on the host, and the same training."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import zeroshard
from tests.matrix import slow
from tests.ranks import on_ranks
from tests.training import STAGES, adamw
from zeroshard import Activations
from zeroshard.config.table import Place
from zeroshard.recompute.host_pool import HostSlot
from zeroshard.recompute.saved_input import MovedInput
from zeroshard.runtime import runtime_of

PLAN = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


class Block(nn.Module):
    """With dropout, whose random numbers must come again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.down(F.dropout(torch.relu(self.up(self.norm(x))), 0.3, self.training))


class Net(nn.Module):
    def __init__(self, width: int = 10, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.last(x)


def mesh_of(data: int, model: int) -> DeviceMesh:
    return init_device_mesh("cpu", (data, model), mesh_dim_names=("dp", "tp"))


def build(mesh: DeviceMesh | None, width: int = 10) -> Net:
    torch.manual_seed(1)
    model = Net(width)
    if mesh is not None:
        parallelize_module(model, mesh["tp"], PLAN)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, index: int, steps: int = 3, rows: int = 6) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * step + index)  # of dropout: tensor-parallel ranks have halves of different matrices
        x = torch.randn(rows, 7, generator=torch.Generator().manual_seed(1000 * step + index))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(mesh: DeviceMesh | None, width: int = 10, **options: Any) -> tuple[list[float], dict[str, Tensor], Any]:
    model = build(mesh, width)
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), **options)
    index = dist.get_rank() if mesh is None else mesh["dp"].get_local_rank()
    losses = train(model, optimizer, index)
    return losses, zeroshard.full_state_dict(model), model


def assert_same_bits(ours: tuple[Any, ...], theirs: tuple[Any, ...], what: object) -> None:
    assert ours[0] == theirs[0], what
    different = [name for name in ours[1] if not torch.equal(ours[1][name], theirs[1][name])]
    assert not different, f"{what}: {different}"


@pytest.mark.parametrize("stage", [2, *map(slow, (0, 1, 3))])
@on_ranks(2)
def test_checkpoints_of_compiled_blocks_change_no_bit(stage: int) -> None:
    mesh = mesh_of(1, 2)

    def compiled(options: Activations | None) -> tuple[list[float], dict[str, Tensor]]:
        torch.compiler.reset()
        model = build(mesh)
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage, activations=options)
        return train(model, optimizer, mesh["dp"].get_local_rank()), zeroshard.full_state_dict(model)

    plain = compiled(None)
    for options in (Activations(), Activations(partition=True), Activations(partition=True, offload=True)):
        assert_same_bits(compiled(options), plain, (options, stage))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4)
def test_divided_and_offloaded_checkpoints_change_no_bit(stage: int) -> None:
    mesh = mesh_of(2, 2)
    plain = trained(mesh, stage=stage)
    for options in (
        Activations(),
        Activations(partition=True),
        Activations(partition=True, prefetch=0),
        Activations(partition=True, offload=True),
        Activations(offload=True, prefetch=2),
    ):
        assert_same_bits(trained(mesh, stage=stage, activations=options), plain, options)


@on_ranks(2)
def test_without_model_parallelism_whole_checkpoints_go_to_the_host() -> None:
    for stage in (0, 2, 3):
        plain = trained(None, stage=stage)
        ours = trained(None, stage=stage, activations=Activations(offload=True))
        assert_same_bits(ours, plain, stage)
        one = 3 * 6 * 10 * 4  # blocks, rows, width, fp32
        assert zeroshard.stats(ours[2]).checkpoint_traffic == {"to the host": one, "to the device": one}
        assert not zeroshard.stats(plain[2]).checkpoint_traffic
        store = runtime_of(ours[2]).checkpoints.store
        assert store.host is not None
        assert store.host.bytes <= 3 * 384  # three slots, used again


@on_ranks(4)
def test_a_divided_checkpoint_costs_one_gather_a_block_and_a_fraction_of_the_memory() -> None:
    mesh = mesh_of(2, 2)
    _, _, model = trained(mesh, width=256, stage=2, activations=Activations(partition=True))
    moved = zeroshard.stats(model).volume_model
    assert set(moved) == {"all_gather"}
    assert moved["all_gather"].calls == 3
    assert moved["all_gather"].elements == 3 * 6 * 256
    stored: list[int] = []
    original = MovedInput.__init__

    def watched(self: MovedInput, *args: Any) -> None:
        original(self, *args)
        stored.append(self._stored.numel())

    MovedInput.__init__ = watched  # type: ignore[method-assign]
    try:
        model(torch.randn(6, 7))
    finally:
        MovedInput.__init__ = original  # type: ignore[method-assign]
    assert stored == [6 * 256 // 2] * 3


@on_ranks(4)
def test_gathers_of_checkpoints_are_under_a_tenth_of_tensor_parallelisms_own() -> None:
    from tests.functional_collectives import count_functional
    from zeroshard.config.job import ModelConfig
    from zeroshard.train.gpt import GPT
    from zeroshard.train.gpt.tensor_parallel import parallelise

    mesh = mesh_of(2, 2)
    model = GPT(ModelConfig(layers=4, hidden=32, heads=4, sequence=16))
    parallelise(model, mesh["tp"])
    model, optimizer = zeroshard.shard(
        model, adamw(model.parameters()), stage=2, activations=Activations(partition=True)
    )
    tokens = torch.zeros(2, 16, dtype=torch.long)
    with count_functional() as traffic:
        model(tokens, tokens).backward()
    optimizer.step()
    own = sum(entry.elements for entry in traffic.counts.values())
    ours = zeroshard.stats(model).volume_model["all_gather"].elements
    assert ours == 4 * 2 * 16 * 32
    assert ours < 0.1 * own


@pytest.mark.slow
@on_ranks(4)
def test_what_checkpoints_move_is_planned_to_the_byte() -> None:
    from zeroshard.config.job import ModelConfig
    from zeroshard.plan.model.gpt import from_config
    from zeroshard.plan.setup import Setup
    from zeroshard.plan.volume import volume
    from zeroshard.train.gpt import GPT
    from zeroshard.train.gpt.tensor_parallel import parallelise

    mesh = mesh_of(2, 2)
    config = ModelConfig(layers=3, hidden=40, heads=4, sequence=7)  # of 560 elements, parts have 320 and 240
    for options in (Activations(partition=True), Activations(offload=True), Activations(partition=True, offload=True)):
        model = GPT(config)
        parallelise(model, mesh["tp"])
        model, optimizer = zeroshard.shard(
            model, adamw(model.parameters()), stage=2, activations=options, offload="cpu", precision="bf16"
        )
        tokens = torch.zeros(2, 7, dtype=torch.long)
        for _ in range(2):
            for _ in range(2):  # micro-batches
                model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        counted = zeroshard.stats(model)
        setup = Setup(stage=2, world=2, model_parallel=2, batch=2, sequence=7, micro_batches=2, activations=options)
        moved = volume(from_config(config), setup)
        gathered = sum(traffic.elements for traffic in counted.volume_model.values())
        assert moved.checkpoints_gathered == gathered == (2 * 3 * 640 if options.partition else 0)
        planned = {"to the host": moved.checkpoints_to_host, "to the device": moved.checkpoints_to_device}
        if options.offload and (not options.partition or mesh["tp"].get_local_rank() == 0):
            assert planned == dict(counted.checkpoint_traffic)
        elif options.offload:  # the last rank's part is smaller
            assert dict(counted.checkpoint_traffic) == {way: size * 240 // 320 for way, size in planned.items()}
        else:
            assert not any(planned.values())
            assert not counted.checkpoint_traffic
        assert sum(counted.host_traffic.values()) > 0  # states, which are told apart from checkpoints


class Pair(NamedTuple):
    left: Tensor
    right: list[Tensor]


@dataclasses.dataclass
class Record:
    value: Tensor


class Structured(nn.Module):
    """Calls ``zeroshard.checkpoint`` itself, on everything it may be given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.last = nn.Linear(9, 5)

    def inner(self, pair: Pair, record: dict[str, Record], *, mask: Tensor, number: int) -> tuple[Tensor, Tensor]:
        left, (right, none) = pair
        assert none.numel() == 0
        both = left + right.t() * mask + record["x"].value.expand(left.shape) * number
        return torch.tanh(both), F.dropout(both, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        call = zeroshard.checkpoint if self.training else (lambda function, *a, **k: function(*a, **k))
        pair = Pair(x * 2, [x.t().contiguous() * 3, x[:0]])
        a, b = call(self.inner, pair, {"x": Record(x.mean())}, mask=torch.ones(9), number=3)
        b = call(lambda t: call(torch.sin, t * 2), b)  # one inside another
        return self.last(a + b)


@pytest.mark.parametrize("options", [{}, {"partition": True}, {"offload": True}, {"partition": True, "offload": True}])
@on_ranks(2)
def test_structures_of_any_shape_and_calls_inside_calls_come_back_as_they_went(options: dict[str, bool]) -> None:
    mesh = mesh_of(1, 2)
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        model = Structured()
        parallelize_module(model, mesh["tp"], {"last": ColwiseParallel(output_layouts=Replicate())})
        activations = Activations(recompute=0 if options else 1, **options) if checkpointed and options else None
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=2, activations=activations)
        model.train(checkpointed)
        results.append((train(model, optimizer, 0), zeroshard.full_state_dict(model)))
    assert_same_bits(results[1], results[0], options)


@on_ranks(2)
def test_the_host_memory_that_checkpoints_wait_in_is_told() -> None:
    *_, on_device = trained(None, stage=2, activations=Activations())
    assert zeroshard.stats(on_device).host_memory is None
    *_, model = trained(None, width=64, stage=2, activations=Activations(offload=True))
    host = zeroshard.stats(model).host_memory
    assert host is not None
    assert host.place is Place.HOST
    assert host.total == host.checkpoints == 3 * 6 * 64 * 4
    assert host.model_states == 0
    *_, both = trained(None, width=64, stage=2, activations=Activations(offload=True), offload="cpu")
    *_, states = trained(None, width=64, stage=2, offload="cpu")
    of_both, of_states = zeroshard.stats(both).host_memory, zeroshard.stats(states).host_memory
    assert of_both is not None
    assert of_states is not None
    assert of_states.checkpoints == 0
    assert of_both == dataclasses.replace(of_states, checkpoints=host.checkpoints)


@on_ranks(2)
def test_memory_is_given_back_with_the_graph() -> None:
    model = build(mesh_of(1, 2), width=64)
    options = Activations(partition=True, offload=True)
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=2, activations=options)
    train(model, optimizer, 0)
    pool = runtime_of(model).checkpoints.store.host
    assert pool is not None
    size = pool.bytes
    assert size > 0
    x = torch.randn(6, 7)
    output = model(x)  # never differentiated
    alive = weakref.ref(output)
    del output
    gc.collect()
    assert alive() is None
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()  # twice through one graph
    optimizer.step()
    optimizer.zero_grad()
    assert pool.bytes == size


@on_ranks(2)
def test_options_that_make_no_sense_are_refused_with_the_remedy() -> None:
    model = build(None)
    with pytest.raises(ValueError, match=r"divides checkpoints among model-parallel ranks.*no tensor parallelism"):
        zeroshard.shard(model, adamw(model.parameters()), activations=Activations(partition=True))
    with pytest.raises(ValueError, match="has no effect with recompute, partition and offload all off"):
        Activations(recompute=0)
    with pytest.raises(ValueError, match=r"activations\.partitoin is unknown \(did you mean 'partition'\?\)"):
        zeroshard.shard(model, adamw(model.parameters()), activations={"partitoin": True})
    with pytest.raises(ValueError, match=r"activations=True must be a zeroshard\.Activations"):
        zeroshard.shard(model, adamw(model.parameters()), activations=True)
    single = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="has only the root unit"):
        zeroshard.shard(single, adamw(single.parameters()), activations=Activations())


@on_ranks(2)
def test_inputs_that_differ_among_tensor_parallel_ranks_are_not_divided() -> None:
    mesh = mesh_of(1, 2)
    torch.manual_seed(1)
    model = Net()
    parallelize_module(
        model,
        mesh["tp"],
        {
            "first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "blocks.*.norm": PrepareModuleInput(
                input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True
            ),
            "last": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        },
    )
    model, _ = zeroshard.shard(model, adamw(model.parameters()), activations=Activations(partition=True), stage=2)
    with pytest.raises(zeroshard.DisagreementError, match="differs among tensor-parallel ranks"):
        model(torch.randn(6, 7))


@on_ranks(2)
def test_a_block_that_is_recomputed_twice_or_writes_to_its_input_is_refused() -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return self.last(x)

    model, _ = zeroshard.shard(twice := Twice(), adamw(twice.parameters()), stage=2, activations=Activations())
    with pytest.raises(RuntimeError, match=r"'blocks\.2' is recomputed by activations= and, around it"):
        model(torch.randn(6, 7)).sum().backward()

    class Writes(Block):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x.mul_(2), scale)

    broken = Net()
    broken.blocks = nn.ModuleList(Writes(10) for _ in range(2))
    broken, _ = zeroshard.shard(broken, adamw(broken.parameters()), stage=2, activations=Activations(offload=True))
    with pytest.raises(RuntimeError, match="changed one of its inputs in place"):
        broken(torch.randn(6, 7))


class InPlace(nn.Module):
    """Writes to the inputs of its blocks after they were called; the blocks themselves need no value of theirs."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Linear(1, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x + self.shift.weight.sum())

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 4)
        self.blocks = nn.ModuleList(self.Shift() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * 2
        for block in self.blocks:
            x += block(x)
        return x.to_local() if isinstance(x, DTensor) else x


@pytest.mark.parametrize("divided", [False, True])
@on_ranks(2)
def test_an_input_that_is_written_to_after_the_call_is_never_recomputed_from(divided: bool) -> None:
    gradients = []
    for options in (None, Activations(partition=divided), Activations(partition=divided, offload=True)):
        torch.manual_seed(1)
        model = InPlace()
        if divided:
            first = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(model, mesh_of(1, 2)["tp"], {"first": first})
        model, _ = zeroshard.shard(model, adamw(model.parameters()), stage=0, activations=options)
        if options is not None and (options.offload or not divided):
            for _ in range(2):
                with pytest.raises(RuntimeError, match=r"changed an input of a checkpointed block in place, after"):
                    model(torch.ones(2, 7)).sum().backward()
        else:  # what was divided is a copy
            model(torch.ones(2, 7)).sum().backward()
            gradients.append([p.grad for p in model.parameters()])
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0], rtol=0, atol=0)


@on_ranks(2)
def test_a_dtensor_that_is_written_to_after_the_call_is_never_recomputed_from() -> None:
    for options in (Activations(), Activations(offload=True)):
        model = InPlace()
        first = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
        replicated = {f"blocks.{n}.shift": ColwiseParallel(use_local_output=False) for n in range(3)}
        parallelize_module(model, mesh_of(1, 2)["tp"], {"first": first, **replicated})
        model, _ = zeroshard.shard(model, adamw(model.parameters()), stage=0, activations=options)
        with pytest.raises(RuntimeError, match=r"changed an input of a checkpointed block in place, after"):
            model(torch.ones(2, 7)).sum().backward()


@on_ranks(2)
def test_every_input_that_is_divided_is_compared_in_the_first_step() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(7, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(zeroshard.checkpoint(torch.mul, x, x * (1 + dist.get_rank())))

    model = Two()
    parallelize_module(model, mesh_of(1, 2)["tp"], {"last": ColwiseParallel(output_layouts=Replicate())})
    options = Activations(recompute=0, partition=True)
    model, _ = zeroshard.shard(model, adamw(model.parameters()), stage=2, activations=options)
    with pytest.raises(zeroshard.DisagreementError, match=r"an input of 'checkpoint 0\.1' differs"):
        model(torch.ones(2, 7))


@on_ranks(1)
def test_a_call_that_fails_midway_gives_back_what_it_had_put_away() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(7, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return zeroshard.checkpoint(torch.mul, x, x * 2)

    model = Two()
    options = Activations(recompute=0, offload=True)
    model, _ = zeroshard.shard(model, adamw(model.parameters()), stage=0, activations=options)
    pool = runtime_of(model).checkpoints.store.host
    assert pool is not None
    take, calls = pool.take, 0

    def second_fails(size: int, *, dry: bool = False) -> HostSlot:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            raise RuntimeError("does not fit the host")
        return take(size, dry=dry)

    pool.take = second_fails  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="does not fit the host"):
            model(torch.ones(2, 7))
        gc.collect()
    assert pool.bytes == 128  # the one slot, used again


@on_ranks(1)
def test_copies_to_the_host_hold_no_tensor_of_a_graph_that_is_gone() -> None:
    model = build(None)
    model, _ = zeroshard.shard(model, adamw(model.parameters()), stage=2, activations=Activations(offload=True))
    inputs: list[Any] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage())))
    store = runtime_of(model).checkpoints.store
    output = model(torch.randn(6, 7))
    assert store._copies
    del output
    gc.collect()
    assert len(inputs) == 3
    assert not store._copies
    assert not [storage for storage in inputs if storage() is not None]


# -- which blocks are recomputed --------------------------------------------------------------------------------------


def runs_of_blocks(model: nn.Module, depth: int) -> list[int]:
    """How often the forward of each block runs in one step."""
    runs = [0] * depth
    for number, block in enumerate(model.blocks):  # type: ignore[arg-type]

        def count(*_: object, number: int = number) -> None:
            runs[number] += 1

        block.up.register_forward_pre_hook(count)
    model(torch.randn(6, 7)).sum().backward()
    return runs


CHOICES: dict[float | str | tuple[str, ...], list[int]] = {
    1: [2, 2, 2, 2],
    0.5: [2, 2, 1, 1],
    0.01: [2, 1, 1, 1],
    "blocks.1": [1, 2, 1, 1],
    ("blocks.[03]",): [2, 1, 1, 2],
}


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@on_ranks(1)
def test_a_share_recomputes_the_first_blocks_and_names_recompute_those(choice: Any) -> None:
    model = Net(depth=4)
    model, _ = zeroshard.shard(model, adamw(model.parameters()), stage=0, activations=Activations(recompute=choice))
    assert runs_of_blocks(model, 4) == CHOICES[choice]
    seen = zeroshard.stats(model)
    assert seen.recomputed_blocks == CHOICES[choice].count(2)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_part_of_the_blocks_is_recomputed_with_the_same_bits(stage: int) -> None:
    plain = trained(None, stage=stage)
    offloads = (None, "cpu") if stage == 2 else (None,)
    for offload in offloads:
        expected = plain if offload is None else trained(None, stage=stage, offload=offload)
        for options in (
            Activations(recompute=0.4),
            Activations(recompute=("blocks.0", "blocks.2")),
            Activations(recompute=0.7, offload=True),
        ):
            ours = trained(None, stage=stage, offload=offload, activations=options)
            assert_same_bits(ours, expected, (stage, offload, options))


@on_ranks(1)
def test_a_block_that_is_kept_is_the_users_own_module() -> None:
    model = build(None)
    model, _ = zeroshard.shard(model, adamw(model.parameters()), stage=2, activations=Activations(recompute=0.3))
    assert ["forward" in vars(block) for block in model.blocks] == [True, False, False]


@on_ranks(1)
def test_what_cannot_be_recomputed_is_refused_with_the_remedy() -> None:
    for options, told in (
        ({"recompute": "blocks.7"}, r"recompute names 'blocks\.7', which is no block; blocks: blocks\.0, blocks\.1"),
        ({"recompute": ("blocks.0", "first")}, r"names 'first', which is no block"),
        ({"recompute": 2}, r'recompute=2 must be a share from 0 to 1, "auto", or names of blocks'),
        ({"recompute": True}, r"recompute=True must be a share"),
        ({"checkpoint": False}, r"activations\.checkpoint is gone: leave it out .* say recompute=0"),
    ):
        model = build(None)
        with pytest.raises((ValueError, TypeError), match=told):
            zeroshard.shard(model, adamw(model.parameters()), stage=2, activations=options)
    with pytest.raises(TypeError, match=r"activations\.checkpoint is gone"):
        Activations(checkpoint=True)  # type: ignore[call-arg]
