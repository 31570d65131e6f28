"""Tensor parallelism as PyTorch has it, seen from here: parameters that are DTensors, of which a rank has a part.

``torch.distributed.tensor.parallel.parallelize_module`` divides a model's matrices among the ranks of a one-dimensional
mesh. The parameters stay DTensors, for the model's own forward; what zeroshard divides further, along the
data-parallel dimension, is each rank's *local* part. Which part that is, is a ``layout.Box``. A DTensor that is
replicated counts as a plain parameter: every model-parallel rank has all of it, with the same gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..config.layout import Box, contiguous_strides
from ..system import compat


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh of tensor parallelism, which all DTensors of a model must share; None if the model has none."""
    found: dict[str, DeviceMesh] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            mesh: DeviceMesh = parameter.device_mesh
            if mesh.ndim != 1:
                raise ValueError(
                    f"parameter {name!r} is a DTensor on a mesh of {mesh.ndim} dimensions; parallelise the model over "
                    'one of them, as in parallelize_module(model, mesh["tp"], plan), and leave the others to shard()'
                )
            placement = parameter.placements[0]
            if type(placement) not in (Shard, Replicate):
                raise ValueError(
                    f"parameter {name!r} is a DTensor placed as {placement}; only Shard and Replicate can be trained"
                )
            found[name] = mesh
    names = list(found)
    for name in names[1:]:
        if found[name] != found[names[0]]:
            raise ValueError(
                f"parameters {names[0]!r} and {name!r} are DTensors on different meshes; parallelise the model over one"
            )
    return found[names[0]] if names else None


def box_of(parameter: Tensor) -> Box | None:
    """Which part of a parameter this rank has; None if all of it."""
    if not isinstance(parameter, DTensor) or not isinstance(parameter.placements[0], Shard):
        return None
    axis, size = parameter.placements[0].dim, parameter.shape[parameter.placements[0].dim]
    chunk = math.ceil(size / parameter.device_mesh.size())
    offsets = [0] * parameter.dim()
    offsets[axis] = min(size, chunk * compat.mesh_ranks(parameter.device_mesh).index(dist.get_rank()))
    return Box(tuple(parameter.shape), tuple(offsets))


def divided(parameter: Tensor) -> bool:
    """Whether tensor parallelism leaves this rank a part of a parameter."""
    return box_of(parameter) is not None


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: a DTensor's local part, any other itself."""
    return compat.local_tensor(tensor)


def local_numel(parameter: Tensor) -> int:
    """Elements that this rank has of a parameter."""
    return compat.local_tensor(parameter).numel()


def share_numel(parameter: Tensor) -> int:
    """Elements of the largest part that a rank has of a parameter: the same number on all, where parts are uneven.

    Models are divided into units and flats by it, so that these are the same on all tensor-parallel ranks.
    """
    if not isinstance(parameter, DTensor) or not isinstance(parameter.placements[0], Shard):
        return local_numel(parameter)
    axis = parameter.placements[0].dim
    along = math.ceil(parameter.shape[axis] / parameter.device_mesh.size())
    return along * math.prod(size for number, size in enumerate(parameter.shape) if number != axis)


def local_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    """This rank's part of a gradient, placed as its parameter is: a partial sum is added up over the mesh."""
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return compat.completed(compat.local_tensor(gradient))


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """A local part as a tensor of the parameter's kind: a DTensor where that is one."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=contiguous_strides(tuple(parameter.shape)),
    )


def whole(parameter: Tensor, part: Tensor) -> Tensor:
    """Puts the parts of all model-parallel ranks together. Collective among them."""
    if not divided(parameter):
        return part
    joined = like(parameter, part)
    assert isinstance(joined, DTensor)
    with torch.no_grad():
        return joined.full_tensor()


# -- which ranks share what -------------------------------------------------------------------------------------------


class Grid(NamedTuple):
    """All ranks, by what they have in common."""

    data: list[list[list[int]]]
    """By model-parallel rank: replicas, each a row of ranks that divide one set of states."""
    model: list[list[int]]
    """Groups of ranks that divide a model's matrices; of one rank each without tensor parallelism."""


Gather = Callable[[object], list[Any]]
"""Every rank's small Python value, in rank order."""


def grid(mesh: DeviceMesh | None, model_mesh: DeviceMesh | None, gather: Gather | None) -> Grid:
    """Finds the groups from the mesh given to ``shard()`` and that of the DTensors; either may be missing.

    Each rank knows its own part of both. ``gather`` tells those of the others; without it, where the others are not
    there, the ranks are taken to be arranged regularly.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    mine = [dist.get_rank() if dist.is_initialized() else 0] if model_mesh is None else compat.mesh_ranks(model_mesh)
    rows = None if mesh is None else compat.mesh_ranks(mesh) if mesh.ndim == 2 else [compat.mesh_ranks(mesh)]
    if model_mesh is None:
        if mesh is not None and mesh.ndim == 1:
            raise ValueError(
                "mesh must have two dimensions, replicas and shards, for a model without tensor parallelism; of one "
                "dimension it is what shard() does anyway, so leave it out"
            )
        found = Grid([rows or [list(range(world))]], [[rank] for rank in range(world)])
    elif gather is None:
        found = _regular(mine, rows, world)
    else:
        everybody = gather((mine, rows))
        model = sorted({tuple(ranks) for ranks, _ in everybody})
        if len({len(ranks) for ranks in model}) > 1:
            raise ValueError(f"groups of tensor parallelism have different sizes: {[list(r) for r in model]}")
        columns = [[ranks[number] for ranks in model] for number in range(len(mine))]
        found = Grid([everybody[column[0]][1] or [column] for column in columns], [list(r) for r in model])
    members = sorted(rank for column in found.data for row in column for rank in row)
    if members != list(range(world)):
        beside = "" if model_mesh is None else f" beside groups of tensor parallelism {found.model}"
        shown = found.data[0] if model_mesh is None else found.data
        raise ValueError(
            f"mesh covers ranks {shown}{beside}, which are not the {world} ranks of the process group, each once"
        )
    return found


def _regular(mine: list[int], rows: list[list[int]] | None, world: int) -> Grid:
    """The grid of a world of which only this rank is there: every group is like its own, shifted."""
    degree = len(mine)
    stride = mine[1] - mine[0] if degree > 1 else 1
    span = stride * degree
    model = [
        [base + offset + stride * n for n in range(degree)]
        for base in range(0, world, span)
        for offset in range(stride)
    ]
    if rows is None:
        return Grid([[[ranks[number] for ranks in model]] for number in range(degree)], model)
    own = mine.index(dist.get_rank())
    return Grid([[[r + (n - own) * stride for r in row] for row in rows] for n in range(degree)], model)
