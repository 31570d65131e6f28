"""What there is to save of a sharded model: which ranges this rank writes, and everything that is no range.

Every element is written once, by a rank that has it anyway: where states are whole on every rank (stage 0), or on
several (the replicas of a mesh), the ranks divide the writing.

A 16-bit parameter that a master stands behind is not written: it is that master, rounded. Only where a delayed update
waits to be published do both count, for the next step still runs on the older one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..comm import parallel
from ..comm.fabric import Fabric
from ..config.layout import Piece, Range
from ..optim.optimizer import ShardedOptimizer
from ..runtime import Runtime
from ..states.flat import Flat
from . import random_state
from .boxes import Region, numel_of, whole_box
from .describe import describe
from .format import BUFFER, SAFETENSORS, SHOWN, VALUE, state_kind, tensor_kind
from .names import name_of
from .values import SMALL_BYTES, EncodingError, encode
from .write import Held


class Contents(NamedTuple):
    """What one rank writes."""

    held: list[Held]
    scalars: dict[str, Any]
    values: dict[str, Any]
    joined_bytes: int = 0
    """Host memory that reading takes beside: the largest master that is split, put together."""


def region_of(flat: Flat, slot: int, start: int, stop: int) -> Region:
    """Which elements of a parameter a range of its slot holds."""
    place = flat.layout.slots[slot]
    if place.box is None:
        return Region(whole_box(place.shape), start, stop)
    box = tuple((low, low + size) for low, size in zip(place.box.offsets, place.shape, strict=True))
    return Region(box, start, stop)


def written_range(flat: Flat, fabric: Fabric) -> Range:
    """The range of a flat that this rank writes: its shard, or its share of it where other ranks have the same."""
    shard, replicas, mine = flat.shard_range, fabric.replicas.world, fabric.replicas.rank
    if not flat.divided:  # then every rank of tensor parallelism has it
        replicas, mine = replicas * fabric.model.world, mine * fabric.model.world + fabric.model.rank
    return Range(
        shard.start + shard.numel * mine // replicas,
        shard.start + shard.numel * (mine + 1) // replicas,
    )


def collect(
    runtime: Runtime, optimizer: ShardedOptimizer | None, *, scheduler: Any, loader: Any, extra: object
) -> Contents:
    """Everything that this rank has to write. Waits for updates under way; no tensor is read yet."""
    fabric = runtime.fabric
    runtime.check_no_block_open("save()")
    if runtime.optimizer is not None:
        runtime.optimizer.settle("save()")
    large: list[Tensor] = []

    def keep(tensor: Tensor) -> str:
        large.append(tensor)
        return f"#{len(large) - 1}"

    held: list[Held] = []
    masters = _Masters()
    scalars: dict[str, Any] = {}
    for unit in runtime.units:
        for flat in unit.flats:
            flat.check_unwritten()
            held += _values_of(flat, fabric, masters)
            if optimizer is not None and flat.trainable:
                held += _states_of(flat, fabric, optimizer)
                scalars |= _scalars(flat, optimizer)
    values: dict[str, Any] = {
        "random": encode(random_state.read(fabric.device), "the random state", keep),
        "place": list(random_state.Seat.of(fabric)),
    }
    if loader is not None:
        values["loader"] = encode(_state_dict(loader, "loader"), "loader", keep)
    held += [_whole(name, BUFFER, buffer) for name, buffer in buffers_of(runtime) if writes_buffer(buffer, fabric)]
    if fabric.rank == 0:
        values |= {
            "about": encode(describe(runtime), "the description of the model", keep),
            "shared": encode(_shared(runtime, optimizer), "the optimizer's settings", keep),
            "module": encode(extra_states_of(runtime), "the model's extra state", keep),
            "extra": encode(extra, "extra", keep),
        }
        if scheduler is not None:
            values["scheduler"] = encode(_state_dict(scheduler, "scheduler"), "scheduler", keep)
    held += [_whole(f"#{number}", tensor_kind(fabric.rank), tensor) for number, tensor in enumerate(large)]
    held.sort(key=lambda piece: -piece.dtype.itemsize)  # so that every range lies on a multiple of its elements
    return Contents(held, scalars, values, masters.largest)


class _Masters:
    """Puts masters together that are split, once for all their pieces, and has one at a time."""

    def __init__(self) -> None:
        self._flat: Flat | None = None
        self._values: Tensor | None = None
        self.largest = 0
        """Bytes of the largest one."""

    def expect(self, flat: Flat) -> None:
        if flat.home.joins_master:
            self.largest = max(self.largest, flat.own.numel * flat.master_dtype.itemsize)

    def of(self, flat: Flat) -> Tensor:
        """This flat's; pieces of a flat are read one after the other, as they are listed."""
        if self._values is None or self._flat is not flat:
            self._flat = self._values = None
            self._flat, self._values = flat, flat.home.master()
        return self._values


def _values_of(flat: Flat, fabric: Fabric, masters: _Masters) -> Iterator[Held]:
    if fabric.rank == 0:
        yield from _without_elements(flat)
    part = written_range(flat, fabric)
    pieces = flat.layout.pieces(part)
    if not flat.trainable:
        at_rest = partial(getattr, flat, "parameters_at_rest")
        into_kept = part.start - flat.at_rest.start
        for piece in pieces:
            yield _held(flat, piece, VALUE, flat.dtype, partial(_slice, at_rest, into_kept + piece.offset, piece))
        return
    masters.expect(flat)
    master = partial(masters.of, flat)
    into_own = part.start - flat.own.start
    for piece in pieces:
        yield _held(flat, piece, VALUE, flat.master_dtype, partial(_slice, master, into_own + piece.offset, piece))
    if flat.home.held:
        shown = flat.home.shown
        for piece in pieces:
            yield _held(flat, piece, SHOWN, flat.dtype, partial(_slice, shown, into_own + piece.offset, piece))


def _without_elements(flat: Flat) -> Iterator[Held]:
    """Parameters that no range has a piece of; they are written all the same, as the model has them."""
    dtype = flat.master_dtype if flat.trainable else flat.dtype
    for slot in flat.layout.slots:
        box = whole_box(slot.whole_shape)
        if numel_of(box) == 0:
            empty = partial(torch.empty, 0, dtype=dtype)
            yield _storable(Held(name_of(slot.name), VALUE, slot.whole_shape, Region(box, 0, 0), dtype, empty))


def _states_of(flat: Flat, fabric: Fabric, optimizer: ShardedOptimizer) -> Iterator[Held]:
    owners = {piece.slot: piece for piece in flat.pieces}
    for piece in flat.layout.pieces(written_range(flat, fabric)):
        owner = owners[piece.slot]
        tensor = flat.pieces[owner]
        for name, value in optimizer.piece_states.of(tensor).items():
            if is_elementwise(value, tensor):
                part_of = value[piece.start - owner.start :][: piece.numel]
                yield _held(flat, piece, _kind_of_state(name), value.dtype, partial(_itself, part_of))


def _kind_of_state(name: object) -> str:
    if not isinstance(name, str):
        raise EncodingError(f"the optimizer has a state called {name!r}, which is no string; call it {str(name)!r}")
    return state_kind(name)


def is_elementwise(value: object, piece: Tensor) -> bool:
    """Whether a state has one element for each of the piece's; the others belong to the parameter as a whole."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == piece.shape


def _scalars(flat: Flat, optimizer: ShardedOptimizer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for piece, tensor in flat.pieces.items():
        name = name_of(flat.layout.slots[piece.slot].name)
        state = optimizer.piece_states.of(tensor)
        mine = {key: value for key, value in state.items() if not is_elementwise(value, tensor)}
        if mine:
            found[name] = encode(mine, f"the optimizer's state of {name!r}", partial(_too_large, name))
    return found


def _too_large(name: str, tensor: Tensor) -> str:
    raise EncodingError(
        f"the optimizer's state of {name!r} has a tensor of shape {list(tensor.shape)}, which is not one element for "
        f"each of the parameter's: such a state can be saved up to {SMALL_BYTES} bytes only"
    )


def _held(flat: Flat, piece: Piece, kind: str, dtype: torch.dtype, read: Callable[[], Tensor]) -> Held:
    slot = flat.layout.slots[piece.slot]
    region = region_of(flat, piece.slot, piece.start, piece.stop)
    return _storable(Held(name_of(slot.name), kind, slot.whole_shape, region, dtype, read))


def _storable(held: Held) -> Held:
    """Checked: safetensors has names for some dtypes only."""
    if held.dtype not in SAFETENSORS:
        remedy = {
            VALUE: "make it a buffer of its bits, parameter.view(torch.uint8)",
            BUFFER: "keep it in another form, such as torch.view_as_real() for complex numbers, or its bits, "
            "buffer.view(torch.uint8); or register it with persistent=False",
        }.get(held.kind, "keep it in another dtype")
        what = "parameter" if held.kind == VALUE else held.kind
        raise EncodingError(f"{what} {held.name!r} is of {held.dtype}, which a checkpoint cannot hold; {remedy}")
    return held


def _whole(name: str, kind: str, tensor: Tensor) -> Held:
    """A tensor that is not in a flat: all that this rank has of it."""
    read = partial(_flattened, parallel.local(tensor))
    return _storable(Held(name, kind, tuple(tensor.shape), local_region(tensor), tensor.dtype, read))


def local_region(tensor: Tensor) -> Region:
    """Which elements of a tensor this rank has: all of them, unless it is a DTensor."""
    part, box = parallel.local(tensor), parallel.box_of(tensor)
    if box is None:
        return Region(whole_box(tuple(tensor.shape)), 0, tensor.numel())
    sides = tuple((low, low + size) for low, size in zip(box.offsets, part.shape, strict=True))
    return Region(sides, 0, part.numel())


def writes_buffer(buffer: Tensor, fabric: Fabric) -> bool:
    """Buffers follow rank 0; where tensor parallelism divides one, the first rank that has a part of it."""
    if parallel.divided(buffer):
        return fabric.shard_rank == 0 and fabric.replicas.rank == 0
    return fabric.rank == 0


def _slice(values: Callable[[], Tensor], offset: int, piece: Piece) -> Tensor:
    return values()[offset : offset + piece.numel]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _flattened(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)


def _state_dict(thing: Any, name: str) -> Any:
    if not callable(getattr(thing, "state_dict", None)):
        raise ValueError(
            f"{name}: a {type(thing).__name__} has no state_dict(), so its position cannot be saved; use one that has, "
            f"such as torchdata's StatefulDataLoader, or leave {name}= out and put what you need into extra="
        )
    return thing.state_dict()


def buffers_of(runtime: Runtime) -> list[tuple[str, Tensor]]:
    """The buffers that the model's state dict has, each once."""
    parameters = {id(parameter) for parameter in runtime.model.parameters()}
    found: dict[int, tuple[str, Tensor]] = {}
    for name, value in _named(runtime).items():
        if isinstance(value, Tensor) and id(value) not in parameters:
            found.setdefault(id(value), (name_of(name), value))
    return list(found.values())


def extra_states_of(runtime: Runtime) -> dict[str, Any]:
    """What modules keep besides tensors (``get_extra_state``), by name."""
    found = {}
    for name, module in runtime.model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found[name_of(name)] = module.get_extra_state()
    return found


def _named(runtime: Runtime) -> dict[str, Any]:
    with runtime.guards.names_only():
        named: dict[str, Any] = runtime.model.state_dict(keep_vars=True)
    extra = {f"{name}." if name else "" for name in extra_states_of(runtime)}
    return {name: value for name, value in named.items() if name_of(name).removesuffix("_extra_state") not in extra}


def _shared(runtime: Runtime, optimizer: ShardedOptimizer | None) -> dict[str, Any]:
    """Settings and counts that are the same on all ranks."""
    if optimizer is None:
        return {}
    names = {id(p): name_of(name) for name, p in runtime.model.named_parameters()}
    return {
        "optimizer": type(optimizer.unsharded).__name__,
        "groups": [
            {
                "settings": {key: value for key, value in group.items() if key != "params"},
                "parameters": [names[id(parameter)] for parameter in group["params"]],
            }
            for group in optimizer.param_groups
        ],
        "common": optimizer.piece_states.common(),
        "progress": optimizer.progress(),
    }
