"""The units and flats of a model as numbers, divided as in ``config/layout.py`` but without tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..comm.parallel import divided, local_numel, share_numel
from ..config.layout import ALIGNMENT, divide_into_flats, find_units, round_up
from .shape import Setup, Transformer


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
    """One unit. A block that is too large for one unit has several, and they are recomputed together."""

    block: int
    """The number of its block, from 1; 0 for the root."""
    flats: tuple[FlatShape, ...]

    def numel(self, world: int) -> int:
        return sum(flat.numel(world) for flat in self.flats)


def module_units(
    model: nn.Module, width: int | None, max_unit_bytes: int, chosen: Sequence[str | type[nn.Module]] | None = None
) -> tuple[UnitShape, ...]:
    """The units that ``shard()`` makes of a model, the root first.

    ``width``: bytes of a parameter, if all are cast to one dtype. ``chosen``: modules that the user names as units. For
    a model with tensor parallelism, these are the units of this rank's part.

    >>> [unit.numel(world=2) for unit in module_units(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 2, 1 << 30)]
    [0, 128, 128]
    """
    specs = find_units(model, chosen=chosen, max_unit_bytes=max_unit_bytes, itemsize=width, numel=share_numel)
    return tuple(
        UnitShape(
            block,
            tuple(
                FlatShape.of([local_numel(parameter) for _, parameter in members], members[0][1].requires_grad)
                for members in divide_into_flats(
                    spec.parameters, max_unit_bytes, width, numel=share_numel, divided=divided
                )
            ),
        )
        for block, spec in enumerate(specs)
    )


def transformer_units(model: Transformer, setup: Setup) -> tuple[UnitShape, ...]:
    """The units of one model-parallel rank, the root first.

    Model parallelism is Megatron's: it divides the matrices of a block and the vocabulary, not the norms.
    """
    return _transformer_units(model, setup.model_parallel, setup.width, setup.max_unit_bytes)


class _Part(NamedTuple):
    """A module inside a block: the sizes of its own parameters, and its children."""

    sizes: tuple[int, ...] = ()
    children: tuple[_Part, ...] = ()

    @property
    def all_sizes(self) -> tuple[int, ...]:
        return self.sizes + tuple(size for child in self.children for size in child.all_sizes)

    def split(self, most: int) -> list[_Part]:
        """Divides a module of more than ``most`` elements at its children, as ``find_units`` does."""
        if sum(self.all_sizes) <= most or not self.children:
            return [self]
        return [part for child in self.children for part in child.split(most)]


@lru_cache(maxsize=4096)
def _transformer_units(model: Transformer, parallel: int, width: int, max_unit_bytes: int) -> tuple[UnitShape, ...]:
    most = max_unit_bytes // width
    block = [_flats(part.all_sizes, most) for part in _block(model, parallel).split(most)]
    root = UnitShape(0, _flats(_root(model, parallel), most))
    return root, *(UnitShape(number, part) for number in range(1, model.layers + 1) for part in block)


def _flats(sizes: Sequence[int], most: int) -> tuple[FlatShape, ...]:
    """Divides sizes into flats, as ``divide_into_flats`` does."""
    groups: list[list[int]] = [[]]
    for size in sizes:
        if groups[-1] and sum(round_up(other, ALIGNMENT) for other in (*groups[-1], size)) > most:
            groups.append([])
        groups[-1].append(size)
    return tuple(FlatShape.of(group) for group in groups)


def _root(model: Transformer, parallel: int) -> list[int]:
    embedding = math.ceil(model.vocabulary / parallel) * model.hidden
    sizes = [embedding, *([model.positions * model.hidden] if model.positions else []), *_norm(model)]
    return sizes if model.tied else [*sizes, embedding]


def _block(model: Transformer, parallel: int) -> _Part:
    hidden, mlp = model.hidden, math.ceil(model.mlp_width / parallel)
    own, shared = math.ceil(model.query_width / parallel), math.ceil(model.kv_width / parallel)

    def linear(inputs: int, outputs: int, bias: int) -> _Part:
        return _Part((inputs * outputs, bias) if model.biases else (inputs * outputs,))

    if model.gated or model.kv_width != model.query_width:
        reads = [linear(hidden, size, size) for size in (own, shared, shared)]
    else:
        reads = [linear(hidden, 3 * own, 3 * own)]
    ways_up = [linear(hidden, mlp, mlp) for _ in range(2 if model.gated else 1)]
    if model.gated and model.biases:  # shape.py counts two biases: of one matrix up, and of the matrix down
        ways_up[0] = _Part((hidden * mlp,))
    norm = _Part(tuple(_norm(model)))
    head_norms = [_Part((size,)) for size in model.head_norm_sizes]
    attention = _Part(children=(*reads, linear(own, hidden, hidden), *head_norms))
    return _Part(children=(norm, attention, norm, _Part(children=(*ways_up, linear(mlp, hidden, hidden)))))


def _norm(model: Transformer) -> list[int]:
    return [model.hidden] * (2 if model.biases else 1)


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
