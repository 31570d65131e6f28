"""The units and flats of a model as numbers, divided as in ``config/layout.py``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...comm.parallel import divided, local_numel, share_numel
from ...config.layout import ALIGNMENT, divide_into_flats, find_units, round_up


class FlatShape(NamedTuple):
    """The sizes of one flat, in elements."""

    parameters: int
    """The sum of its parameters."""
    aligned: int
    """The same, with every parameter padded to its boundary."""
    largest: int
    """Its largest parameter."""
    trained: bool = True

    def shard(self, world: int) -> int:
        """Elements of one rank's shard, padding included."""
        return round_up(math.ceil(self.aligned / world), ALIGNMENT)

    def numel(self, world: int) -> int:
        """Elements of the whole flat, padding included."""
        return world * self.shard(world)

    @classmethod
    def of(cls, sizes: Sequence[int], trained: bool = True) -> FlatShape:
        aligned = sum(round_up(size, ALIGNMENT) for size in sizes)
        return cls(sum(sizes), aligned, max(sizes), trained)


class UnitShape(NamedTuple):
    """One unit. A block that is too large for one unit has several."""

    block: int
    """The number of its block, from 1; 0 for the root. If blocks are recomputed, then each as a whole."""
    flats: tuple[FlatShape, ...]

    def numel(self, world: int) -> int:
        return sum(flat.numel(world) for flat in self.flats)


def module_units(
    model: nn.Module,
    width: int | None,
    max_unit_bytes: int,
    chosen: Sequence[str | type[nn.Module]] | None = None,
    *,
    blocks: Sequence[str] | None = None,
    is_divided: Callable[[nn.Parameter], bool] = divided,
) -> tuple[UnitShape, ...]:
    """The units that ``shard()`` makes of a model, the root first.

    ``width``: bytes of a parameter, if all are cast to one dtype. ``chosen``: modules that the user names as units. For
    a model with tensor parallelism, these are the units of this rank's part. ``blocks``: names of the modules that
    units are made of. Without them each unit is a block.

    >>> [unit.numel(world=2) for unit in module_units(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 2, 1 << 30)]
    [0, 128, 128]
    """
    specs = find_units(model, chosen=chosen, max_unit_bytes=max_unit_bytes, itemsize=width, numel=share_numel)
    of_name = {name: number for number, name in enumerate(blocks or (), start=1)}

    def block_of(number: int, name: str) -> int:
        while name and blocks is not None:
            if name in of_name:
                return of_name[name]
            name, _, _ = name.rpartition(".")
        return number

    return tuple(
        UnitShape(
            block_of(number, spec.name),
            tuple(
                FlatShape.of([local_numel(parameter) for _, parameter in members], members[0][1].requires_grad)
                for members in divide_into_flats(
                    spec.parameters, max_unit_bytes, width, numel=share_numel, divided=is_divided
                )
            ),
        )
        for number, spec in enumerate(specs)
    )


def buffer_bytes(model: nn.Module) -> int:
    """Bytes of a model's buffers. A sparse buffer has indices and values.

    >>> class Graph(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.register_buffer("edges", torch.eye(3).to_sparse())
    >>> buffer_bytes(Graph())
    60
    """
    return sum(_bytes_of(buffer) for buffer in model.buffers())


def _bytes_of(buffer: Tensor) -> int:
    if buffer.layout is not torch.sparse_coo:
        return buffer.nbytes
    whole = buffer.detach().coalesce()
    return whole.indices().nbytes + whole.values().nbytes
