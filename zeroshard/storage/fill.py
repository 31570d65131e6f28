"""Reads what this rank keeps of a checkpoint into memory that is there: values, states, settings of groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..comm import parallel
from ..config.layout import Range
from ..optim.optimizer import ShardedOptimizer
from ..runtime import Runtime
from ..states.flat import Flat
from .checked import HOW_TO_COMPUTE, no_tensor
from .contents import buffers_of, local_region, region_of
from .format import BUFFER, SHOWN, VALUE, state_name
from .index import Index
from .names import name_of
from .read import Reader
from .values import decode


def fill(reader: Reader, runtime: Runtime, optimizer: ShardedOptimizer | None) -> dict[Flat, Tensor]:
    """Reads everything that this rank keeps. Nothing is communicated, so ranks may fail one by one.

    Returns older parameters that the next step runs on, where an update is held back.
    """
    older: dict[Flat, Tensor] = {}
    if optimizer is not None:
        optimizer.piece_states.forget()
    for flat in _flats(runtime):
        _fill_values(reader, flat)
        if optimizer is not None and flat.trainable:
            _fill_states(reader, flat, optimizer)
            if flat.home.delays and _is_held(reader.index, flat):
                older[flat] = torch.zeros(flat.own.numel)
                _read_range(reader, flat, SHOWN, flat.own, older[flat])
    for name, buffer in buffers_of(runtime):
        part = parallel.local(buffer.data)
        target = torch.empty(part.numel(), dtype=part.dtype, device=part.device)
        reader.read(name, BUFFER, local_region(buffer), target)
        _write(part, target.view(part.shape))
    return older


def _write(tensor: Tensor, values: Tensor) -> None:
    """Copies into a tensor, also into one made by ``expand()``, whose elements along a dimension are one in memory."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


def _fill_values(reader: Reader, flat: Flat) -> None:
    if not flat.trainable:
        _read_range(reader, flat, VALUE, flat.at_rest, flat.parameters_at_rest)
        return
    values = flat.home.loading()
    _read_range(reader, flat, VALUE, flat.own, values)
    flat.home.adopt(values)


def _fill_states(reader: Reader, flat: Flat, optimizer: ShardedOptimizer) -> None:
    index, keeper = reader.index, optimizer.piece_states.of_flat(flat)
    for piece in flat.pieces:
        name = name_of(flat.layout.slots[piece.slot].name)
        region = region_of(flat, piece.slot, piece.start, piece.stop)
        moments = {kind: state for kind in index.kinds[name] if (state := state_name(kind)) is not None}
        for kind, state in moments.items():
            target = keeper.room_for(piece, state, index.dtype(name, kind))
            assert target is not None, f"{state!r} of {name!r}: what does not fit was refused before"
            reader.read(name, kind, region, target)
        scalars = decode(index.scalars.get(name, {}), f"the state of {name!r}", no_tensor)
        keeper.take_scalars(piece, scalars, moments=bool(moments))


def _read_range(reader: Reader, flat: Flat, kind: str, part: Range, target: Tensor) -> None:
    for piece in flat.layout.pieces(part):
        name = name_of(flat.layout.slots[piece.slot].name)
        region = region_of(flat, piece.slot, piece.start, piece.stop)
        # Units may have been others: next to a parameter that was held back may stand one that shows its newest.
        stored = kind if (name, kind) in reader.index.places else VALUE
        reader.read(name, stored, region, target[piece.offset : piece.offset + piece.numel])


def publish(runtime: Runtime, older: dict[Flat, Tensor]) -> None:
    """Shows the loaded parameters: those that the next step runs on."""
    for flat in _flats(runtime):
        if flat not in older:
            flat.publish()
            continue
        newest = flat.home.master().clone()
        flat.home.adopt(older[flat])
        flat.publish()
        flat.wait_if_whole()
        flat.home.hold(newest)


def _is_held(index: Index, flat: Flat) -> bool:
    return any((name_of(slot.name), SHOWN) in index.places for slot in flat.layout.slots)


def _flats(runtime: Runtime) -> Iterable[Flat]:
    return [flat for unit in runtime.units for flat in unit.flats]


def load_settings(optimizer: ShardedOptimizer, shared: dict[str, Any]) -> None:
    """Takes the settings of groups, counts, and what belongs to no parameter."""
    for mine, theirs in zip(optimizer.param_groups, shared["groups"], strict=True):
        mine.update({key: value for key, value in theirs["settings"].items() if key not in HOW_TO_COMPUTE})
    optimizer.piece_states.take_common(shared["common"])
    optimizer.load_progress(shared["progress"])
