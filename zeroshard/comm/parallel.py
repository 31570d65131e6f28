"""Tensor parallelism: parameters that are DTensors, so that each rank has only a part of them.

``torch.distributed.tensor.parallel.parallelize_module`` divides a model's matrices among the ranks of a one-dimensional
mesh. The model's forward goes on using the DTensors. zeroshard divides each rank's *local* part further, among the
data-parallel ranks. A ``layout.Box`` says which part of the matrix is local. A replicated DTensor is treated as a plain
parameter: every tensor-parallel rank has all of it, with the same gradient.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..config.layout import Box, contiguous_strides
from ..system import compat, compat_groups


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh that all DTensors of a model share. None if the model has no DTensors."""
    found: DeviceMesh | None = None
    first = ""
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh: DeviceMesh = parameter.device_mesh
        if mesh.ndim != 1:
            raise ValueError(
                f"parameter {name!r} is a DTensor on a mesh of {mesh.ndim} dimensions; parallelise the model over one "
                'of them, as in parallelize_module(model, mesh["tp"], plan), and leave the others to shard()'
            )
        placement = parameter.placements[0]
        if type(placement) not in (Shard, Replicate):
            raise ValueError(
                f"parameter {name!r} is a DTensor placed as {placement}; only Shard and Replicate can be trained"
            )
        if found is None:
            found, first = mesh, name
        elif mesh != found:
            raise ValueError(
                f"parameters {first!r} and {name!r} are DTensors on different meshes; parallelise the model over one"
            )
    return found


def box_of(parameter: Tensor) -> Box | None:
    """The part of a parameter that this rank has. None if the rank has all of it."""
    if not isinstance(parameter, DTensor) or not isinstance(parameter.placements[0], Shard):
        return None
    axis = parameter.placements[0].dim
    size = parameter.shape[axis]
    chunk = math.ceil(size / parameter.device_mesh.size())
    offsets = [0] * parameter.dim()
    offsets[axis] = min(size, chunk * compat_groups.mesh_ranks(parameter.device_mesh).index(dist.get_rank()))
    return Box(tuple(parameter.shape), tuple(offsets))


def divided(parameter: Tensor) -> bool:
    """Whether tensor parallelism divides a parameter, so that this rank has only a part of it."""
    return box_of(parameter) is not None


def local(tensor: Tensor) -> Tensor:
    """The local part of a DTensor. Any other tensor is returned as it is."""
    return compat.local_tensor(tensor)


def local_numel(parameter: Tensor) -> int:
    """The number of elements of a parameter that this rank has."""
    return compat.local_tensor(parameter).numel()


def share_numel(parameter: Tensor) -> int:
    """The number of elements in the largest part that any rank has of a parameter.

    Parts may be uneven, but this number is the same on all ranks. The division into units and flats uses it, so that
    all tensor-parallel ranks divide alike.
    """
    if not isinstance(parameter, DTensor) or not isinstance(parameter.placements[0], Shard):
        return local_numel(parameter)
    axis, part = parameter.placements[0].dim, list(parameter.shape)
    part[axis] = math.ceil(part[axis] / parameter.device_mesh.size())
    return math.prod(part)


def local_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    """This rank's part of a gradient, divided in the same way as the parameter. Partial sums are added up."""
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return compat_groups.completed(compat.local_tensor(gradient))


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """Makes a DTensor from a local part, if the parameter is a DTensor."""
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
    """Puts the parts of all tensor-parallel ranks together. Collective among these ranks."""
    if not divided(parameter):
        return part
    joined = like(parameter, part)
    assert isinstance(joined, DTensor)
    with torch.no_grad():
        return joined.full_tensor()
