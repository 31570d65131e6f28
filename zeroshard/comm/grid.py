"""Which ranks divide states among them, which are replicas of each other, and which divide the model's matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..system import compat_groups


class Grid(NamedTuple):
    """All ranks, by what they have in common."""

    data: list[list[list[int]]]
    """For each tensor-parallel rank: its replicas. A replica is a row of ranks that divide one set of states."""
    model: list[list[int]]
    """Groups of ranks that divide the model's matrices. Each has one rank if there is no tensor parallelism."""


Gather = Callable[[object], list[Any]]
"""Returns every rank's small Python value, in rank order."""


def grid(mesh: DeviceMesh | None, model_mesh: DeviceMesh | None, gather: Gather | None) -> Grid:
    """Finds the groups from the mesh given to ``shard()`` and the mesh of the DTensors. Either may be missing.

    Each rank knows its own part of both meshes. ``gather`` tells the parts of the other ranks. Without ``gather`` the
    ranks are assumed to be arranged regularly.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = [rank] if model_mesh is None else compat_groups.mesh_ranks(model_mesh)
    rows = None if mesh is None else compat_groups.mesh_ranks(mesh)
    if mesh is not None and mesh.ndim == 1:
        rows = [rows]
    if model_mesh is None and mesh is not None and mesh.ndim == 1:
        raise ValueError(
            "mesh must have two dimensions, replicas and shards, for a model without tensor parallelism; of one "
            "dimension it is what shard() does anyway, so leave it out"
        )
    if gather is None or model_mesh is None:
        everybody = [_regular(mine, rows, rank, other) for other in range(world)]
    else:
        everybody = gather((mine, rows))
    model = sorted({tuple(ranks) for ranks, _ in everybody})
    if len({len(ranks) for ranks in model}) > 1:
        raise ValueError(f"groups of tensor parallelism have different sizes: {[list(r) for r in model]}")
    columns = [[ranks[number] for ranks in model] for number in range(len(mine))]
    found = Grid([everybody[column[0]][1] or [column] for column in columns], [list(ranks) for ranks in model])
    members = sorted(member for column in found.data for row in column for member in row)
    if members != list(range(world)):
        groups = "" if model_mesh is None else f" and groups of tensor parallelism cover {found.model}"
        shown = found.data[0] if model_mesh is None else found.data
        raise ValueError(
            f"mesh covers ranks {shown}{groups}, which are not the {world} ranks of the process group, each once"
        )
    return found


def _regular(
    mine: list[int], rows: list[list[int]] | None, rank: int, other: int
) -> tuple[list[int], list[list[int]] | None]:
    """The tensor-parallel group and the rows of another rank: the same as this rank's, shifted."""
    degree = len(mine)
    stride = mine[1] - mine[0] if degree > 1 else 1
    number = other // stride % degree
    group = [other + (n - number) * stride for n in range(degree)]
    shift = (number - mine.index(rank)) * stride
    if rows is None or shift == 0:
        return group, rows
    return group, [[member + shift for member in row] for row in rows]
