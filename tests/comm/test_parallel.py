"""PyTorch's tensor parallelism together with sharding trains the same as one rank."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import zeroshard
from tests.matrix import Stages, in_stages, slow
from tests.models import Net, net
from tests.ranks import on_ranks
from tests.training import STAGES, adamw
from zeroshard.comm import parallel
from zeroshard.plan.model.units import module_units
from zeroshard.runtime import runtime_of

WIDTH = 12


def plan(odd: bool = False) -> dict[str, Any]:
    """``odd``: the width divides unevenly. DTensors can be passed from layer to layer then, plain tensors cannot."""
    styles: dict[str, Any] = {
        "blocks.*.up": ColwiseParallel(use_local_output=not odd),
        "blocks.*.down": RowwiseParallel(),
    }
    return styles


def parallel_net(mesh: DeviceMesh, width: int = WIDTH, meta: bool = False) -> Net:
    if meta:
        with torch.device("meta"):
            model = net(width=width, depth=2)
    else:
        model = net(width=width, depth=2)
    parallelize_module(model, mesh["tp"], plan(odd=width % 2 == 1))
    return model


def mesh_of(data: int, model: int) -> DeviceMesh:
    return init_device_mesh("cpu", (data, model), mesh_dim_names=("dp", "tp"))


def data(step: int, index: int, rows: int = 6) -> Tensor:
    return torch.randn(rows, 7, generator=torch.Generator().manual_seed(1000 * step + index))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, index: int, steps: int = 3) -> list[float]:
    """``index`` says which batch this rank sees. The ranks of one tensor-parallel group see the same batch."""
    losses = []
    for step in range(steps):
        loss = loss_of(model, data(step, index))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Not Adam: it turns a rounding error in a gradient near zero into a step of full length."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained_alone(
    ranks: int, steps: int = 3, width: int = WIDTH, clip: float | None = None
) -> tuple[list[list[float]], dict[str, Tensor], list[float]]:
    """Plain torch on the batches of all data-parallel ranks: losses by rank, weights, gradient norms."""
    model = net(width=width, depth=2)
    optimizer = momentum(model.parameters())
    losses: list[list[float]] = [[] for _ in range(ranks)]
    norms = []
    for step in range(steps):
        for index in range(ranks):
            loss = loss_of(model, data(step, index))
            (loss / ranks).backward()
            losses[index].append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach() for name, value in model.state_dict().items()}, norms


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def assert_trains_as_alone(
    model: Net, index: int, losses: list[list[float]], weights: dict[str, Tensor], **options: Any
) -> Net:
    """Sharded and trained on batch ``index``, with the results of ``trained_alone``."""
    model, optimizer = zeroshard.shard(model, momentum(model.parameters()), **options)
    torch.testing.assert_close(train(model, optimizer, index), losses[index], rtol=1e-5, atol=1e-6)
    assert_close(zeroshard.full_state_dict(model), weights)
    return model


@pytest.mark.parametrize(
    ("stage", "offload"),
    [(3, None), (2, "cpu"), *(slow(stage, None) for stage in (0, 1, 2)), *(slow(stage, "cpu") for stage in (0, 1, 3))],
)
@on_ranks(4)
def test_two_by_two_ranks_train_as_one_does(stage: int, offload: str | None) -> None:
    mesh = mesh_of(2, 2)
    losses, weights, norms = trained_alone(2, clip=0.5)
    model = parallel_net(mesh)
    parameters = list(model.parameters())
    model = assert_trains_as_alone(
        model,
        mesh["dp"].get_local_rank(),
        losses,
        weights,
        stage=stage,
        mesh=mesh["dp"],
        offload=offload,
        clip_grad_norm=0.5,
        **({} if offload is None else {"precision": "fp32"}),
    )
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), parameters, strict=True))
    assert zeroshard.stats(model).grad_norm == pytest.approx(norms[-1], rel=1e-5)
    assert isinstance(model.blocks[0].up.weight, DTensor)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_model_parallelism_alone_works_in_every_stage_and_needs_no_mesh(stage: int) -> None:
    mesh = mesh_of(1, 2)
    losses, weights, _ = trained_alone(1)
    model = assert_trains_as_alone(parallel_net(mesh), 0, losses, weights, stage=stage)
    assert zeroshard.stats(model).volume == {}


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(4)
def test_parts_of_unequal_size_train_the_same(stage: int) -> None:
    mesh = mesh_of(2, 2)
    losses, weights, _ = trained_alone(2, width=13)
    model = parallel_net(mesh, width=13)
    assert parallel.local(model.blocks[0].up.weight).shape[0] == (20, 19)[mesh["tp"].get_local_rank()]
    assert_trains_as_alone(model, mesh["dp"].get_local_rank(), losses, weights, stage=stage)


@in_stages
@on_ranks(4)
def test_sequence_parallel_norms_get_the_sum_of_their_gradients(stages: Stages) -> None:
    mesh = mesh_of(2, 2)
    losses, weights, norms = trained_alone(2, clip=1e9)
    for stage in stages:
        model = net(width=WIDTH, depth=2)
        parallelize_module(
            model,
            mesh["tp"],
            {
                "first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
                "blocks.*.norm": SequenceParallel(sequence_dim=0),
                "blocks.*.up": ColwiseParallel(input_layouts=Shard(0)),
                "blocks.*.down": RowwiseParallel(output_layouts=Shard(0)),
                "last": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
            },
        )
        index = mesh["dp"].get_local_rank()
        model = assert_trains_as_alone(model, index, losses, weights, stage=stage, clip_grad_norm=1e9)
        assert zeroshard.stats(model).grad_norm == pytest.approx(norms[-1], rel=1e-5)


@in_stages
@on_ranks(4)
def test_memory_is_divided_by_both_dimensions_and_volume_counts_the_data_parallel_one(stages: Stages) -> None:
    mesh = mesh_of(2, 2)
    for stage in stages:
        sizes, volumes = {}, {}
        for degree in (1, 2):
            model = net(width=256, depth=2)
            if degree == 2:
                parallelize_module(model, mesh["tp"], plan())
                model, optimizer = zeroshard.shard(
                    model, adamw(model.parameters()), stage=stage, precision="bf16", mesh=mesh["dp"]
                )
            else:
                rows = {"mesh": DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]))} if stage else {}
                model, optimizer = zeroshard.shard(
                    model, adamw(model.parameters()), stage=stage, precision="bf16", **rows
                )
            train(model, optimizer, 0, steps=2)
            stats = zeroshard.stats(model)
            assert stats.memory_at_step is not None
            sizes[degree] = stats.memory_at_step.model_states
            volumes[degree] = stats.volume_elements / stats.padded_parameters
        # Two rows of two: the same division along the data-parallel dimension, and half the matrices.
        assert sizes[2] == pytest.approx(sizes[1] / 2, rel=0.02)
        assert volumes[2] == pytest.approx(volumes[1], rel=0.02)


@on_ranks(4)
def test_three_dimensions_replicas_shards_and_tensor_parallelism_of_one() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicas", "shards", "tp"))
    losses, weights, _ = trained_alone(2)
    model = net(width=WIDTH, depth=2)
    parallelize_module(model, mesh["tp"], plan())
    options = {"stage": 3, "mesh": mesh["replicas", "shards"], "clip_grad_norm": 1e9}
    model = assert_trains_as_alone(model, mesh["replicas"].get_local_rank(), losses, weights, **options)
    assert set(zeroshard.stats(model).volume_between) == {"all_reduce"}


@on_ranks(4)
def test_a_mesh_with_tensor_parallelism_first_is_understood_too() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    losses, weights, _ = trained_alone(2)
    for stage in (2, 3):
        assert_trains_as_alone(parallel_net(mesh), mesh["dp"].get_local_rank(), losses, weights, stage=stage)


@on_ranks(4)
def test_ranks_start_from_rank_zero_whatever_they_were_built_with() -> None:
    mesh = mesh_of(2, 2)
    torch.manual_seed(dist.get_rank())
    model = Net(width=WIDTH, depth=2)
    parallelize_module(model, mesh["tp"], plan())
    torch.manual_seed(0)
    expected = Net(width=WIDTH, depth=2).state_dict()
    model, _ = zeroshard.shard(model, adamw(model.parameters()), stage=3)
    for name, value in zeroshard.full_state_dict(model).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("width", [slow(WIDTH), 13])
@on_ranks(4)
def test_a_model_on_meta_gets_the_weights_it_would_have_alone(width: int) -> None:
    mesh = mesh_of(2, 2)
    torch.manual_seed(5)
    alone = Net(width=width, depth=2).to_empty(device="cpu")
    torch.manual_seed(7)
    for module in alone.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for precision in ("fp32", "bf16"):
        model = parallel_net(mesh, width, meta=True)
        torch.manual_seed(7)
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=3, precision=precision)
        for name, value in zeroshard.full_state_dict(model).items():
            assert torch.equal(value, alone.state_dict()[name].to(value.dtype)), name
        train(model, optimizer, 0, steps=1)


@on_ranks(4)
def test_weights_are_read_by_parts() -> None:
    mesh = mesh_of(2, 2)
    state = net(width=13, depth=2).state_dict()
    with tempfile.TemporaryDirectory() as folder:
        save_file(state, Path(folder) / "model.safetensors")
        names = [folder]
        dist.broadcast_object_list(names)
        for stage in (1, 3):
            model = parallel_net(mesh, 13, meta=True)
            model, _ = zeroshard.shard(model, adamw(model.parameters()), stage=stage, weights=names[0])
            for name, value in zeroshard.full_state_dict(model).items():
                assert torch.equal(value, state[name]), name
        dist.barrier()


@pytest.mark.slow
@on_ranks(4)
def test_the_optimizers_state_is_whole_and_loads_into_any_degree() -> None:
    mesh = mesh_of(2, 2)
    states = []
    for stage, offload in ((2, None), (3, None), (3, "cpu")):
        model = parallel_net(mesh, 13)
        model, optimizer = zeroshard.shard(
            model, adamw(model.parameters()), stage=stage, precision="bf16", offload=offload
        )
        train(model, optimizer, mesh["dp"].get_local_rank(), steps=2)
        states.append(optimizer.state_dict())
    shapes = [tuple(p.shape) for p in net(width=13, depth=2).parameters()]
    assert [tuple(states[0]["state"][n]["exp_avg"].shape) for n in range(len(shapes))] == shapes
    alone = net(width=13, depth=2)
    alone, optimizer = zeroshard.shard(alone, adamw(alone.parameters()), stage=2, precision="bf16")
    optimizer.load_state_dict(states[0])
    for mine, theirs in zip(optimizer.state_dict()["state"].values(), states[0]["state"].values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq", "master"):
            assert torch.equal(mine[name], theirs[name])
    model = parallel_net(mesh, 13)
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=3, precision="bf16", offload="cpu")
    optimizer.load_state_dict(states[0])
    for mine, theirs in zip(optimizer.state_dict()["state"].values(), states[0]["state"].values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq", "master"):
            assert torch.equal(mine[name], theirs[name])


@on_ranks(4)
def test_an_overflow_on_one_part_is_skipped_by_all() -> None:
    mesh = mesh_of(2, 2)
    model = parallel_net(mesh)
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=2, precision="fp16")
    before = zeroshard.full_state_dict(model)
    loss = loss_of(model, data(0, 0))
    if dist.get_rank() == 3:  # one part of one replica
        model.blocks[0].up.weight.register_hook(lambda gradient: gradient * float("inf"))
    loss.backward()
    optimizer.step()
    assert zeroshard.stats(model).skipped_steps == 1
    after = zeroshard.full_state_dict(model)
    assert all(torch.equal(after[name], before[name]) for name in before)


@on_ranks(4)
def test_gathered_parameters_can_be_written_and_gradients_seen_as_dtensors() -> None:
    mesh = mesh_of(2, 2)
    for stage in (0, 3):
        model = parallel_net(mesh)
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage)
        with zeroshard.gathered(model, write=True), torch.no_grad():
            model.blocks[0].up.weight.fill_(0.25)
        assert bool((zeroshard.full_state_dict(model)["blocks.0.up.weight"] == 0.25).all())
        loss_of(model, data(0, 0)).backward()
        parameter = model.blocks[0].up.weight
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        with zeroshard.gathered_gradients(model):
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            assert gradient.placements == parameter.placements
            norm = gradient.full_tensor().norm()
        if stage == 3:
            torch.testing.assert_close(parameter.grad.norm(), norm)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [slow(2), 3])
@on_ranks(4)
def test_divided_parameters_are_read_in_every_way_of_a_dtensor(stage: int) -> None:
    mesh = mesh_of(2, 2)
    model = parallel_net(mesh)
    model, optimizer = zeroshard.shard(model, momentum(model.parameters()), stage=stage, mesh=mesh["dp"])
    train(model, optimizer, mesh["dp"].get_local_rank(), steps=1)
    name = "blocks.0.up.weight"
    whole = zeroshard.full_state_dict(model)[name]
    mine = whole.chunk(2)[mesh["tp"].get_local_rank()]
    parameter = model.get_parameter(name)
    assert isinstance(parameter, DTensor)
    assert isinstance(parameter, nn.Parameter)
    assert parameter.shape == whole.shape
    assert parameter.placements == (Shard(0),)
    assert torch.equal(parameter.to_local(), mine)
    model.first.weight.sum()  # in stage 3 this releases what was read before
    assert torch.equal(parameter.full_tensor(), whole)
    model.first.weight.sum()
    assert torch.equal(parameter.detach().to_local(), mine)
    model.first.weight.sum()
    assert torch.equal(parameter.data.to_local(), mine)
    model.first.weight.sum()
    penalty = parameter.square().sum()
    (loss_of(model, data(1, mesh["dp"].get_local_rank())) + penalty.full_tensor()).backward()
    optimizer.step()
    assert all(bool(value.isfinite().all()) for value in zeroshard.full_state_dict(model).values())
    if stage == 3:
        with torch.no_grad():
            parameter.to_local().mul_(2)
        with pytest.raises(RuntimeError, match=r"to_local\(\).*the write would be lost"):
            loss_of(model, data(2, mesh["dp"].get_local_rank()))


@on_ranks(4)
def test_torchs_clipping_and_changes_in_place_act_on_the_whole_gradients_of_divided_parameters() -> None:
    mesh = mesh_of(2, 2)

    def change(model: Net) -> Tensor:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for p in model.parameters():
            assert p.grad is not None
            p.grad.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)), alpha=0.01).clamp_(
                -0.05, 0.05
            )
        return norm

    plain = net(width=WIDTH, depth=2)
    optimizer, norms = momentum(plain.parameters()), []
    for step in range(2):
        for index in range(2):
            (loss_of(plain, data(step, index)) / 2).backward()
        norms.append(change(plain))
        optimizer.step()
        optimizer.zero_grad()
    for stage, offload in ((1, None), (3, None), (2, "cpu")):
        model = parallel_net(mesh)
        model, sharded = zeroshard.shard(model, momentum(model.parameters()), stage=stage, offload=offload)
        for step in range(2):
            loss_of(model, data(step, mesh["dp"].get_local_rank())).backward()
            torch.testing.assert_close(change(model), norms[step], rtol=1e-5, atol=0)
            sharded.step()
            sharded.zero_grad()
        assert_close(zeroshard.full_state_dict(model), dict(plain.state_dict()))


@on_ranks(4)
def test_the_box_of_a_part_is_that_of_torch() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    whole = torch.arange(7 * 9).view(7, 9).float()
    for axis in (0, 1):
        for width in (1, 3, 7):
            tensor = distribute_tensor(whole[:width, :width].clone(), mesh, [Shard(axis)])
            box = parallel.box_of(tensor)
            assert box is not None
            assert torch.equal(box.part(whole[:width, :width], parallel.local(tensor).shape), parallel.local(tensor))
    assert parallel.box_of(distribute_tensor(whole, mesh, [Replicate()])) is None


@on_ranks(4)
def test_meshes_that_make_no_sense_are_refused() -> None:
    mesh = mesh_of(2, 2)
    model = parallel_net(mesh)
    with pytest.raises(ValueError, match="not the 4 ranks of the process group, each once"):
        zeroshard.shard(model, adamw(model.parameters()), mesh=mesh["tp"])
    plain = net()
    with pytest.raises(ValueError, match="two dimensions, replicas and shards"):
        zeroshard.shard(plain, adamw(plain.parameters()), mesh=mesh["dp"])
    plain.last.weight = nn.Parameter(distribute_tensor(plain.last.weight.data, mesh, [Replicate(), Shard(0)]))
    with pytest.raises(ValueError, match=r"'last\.weight' is a DTensor on a mesh of 2 dimensions"):
        zeroshard.shard(plain, adamw(plain.parameters()))


@on_ranks(2)
def test_replicated_parameters_whose_gradients_nobody_adds_up_are_named() -> None:
    mesh = mesh_of(1, 2)
    model = net(width=WIDTH, depth=2)
    parallelize_module(
        model,
        mesh["tp"],
        {
            "first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "blocks.*.up": ColwiseParallel(input_layouts=Shard(0)),
            "blocks.*.down": RowwiseParallel(output_layouts=Shard(0)),
            "last": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        },
    )
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=2)
    loss_of(model, data(0, 0)).backward()
    with pytest.raises(zeroshard.DisagreementError, match=r"'blocks\.\d\.norm\.weight'.*nobody adds the gradients up"):
        optimizer.step()


@pytest.mark.parametrize("limit", [2250, 2500])
@on_ranks(2)
def test_uneven_parts_are_divided_into_the_same_units_and_flats_on_all_ranks(limit: int) -> None:
    model = parallel_net(mesh_of(1, 2), width=13)
    planned = [[flat.largest for flat in unit.flats] for unit in module_units(model, None, limit)]
    options: dict[str, Any] = {"stage": 2, "max_unit_bytes": limit}
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), **options)
    units = [(unit.title, [flat.label for flat in unit.flats]) for unit in runtime_of(model).units]
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, units)
    assert everybody[0] == everybody[1]
    assert [len(labels) for _, labels in units] == [len(flats) for flats in planned]
    model(data(0, 0)).square().mean().backward()
    optimizer.step()
