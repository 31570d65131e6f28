"""What a save writes of a sharded model: the ranges that this rank writes, and all other values.

Every element is written once, by a rank that has it anyway. Where states are whole on every rank (stage 0), or on
several (the replicas of a mesh), the ranks divide the writing.

A 16-bit parameter with a master is not written: it is the rounded master. There is one exception: while a delayed
update is held, both are written, because the next step still runs on the older parameters.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..comm import parallel
from ..comm.fabric import Fabric
from ..config.layout import Piece, Range
from ..config.table import Place
from ..optim.optimizer import ShardedOptimizer
from ..runtime import Runtime
from ..states.flat import Flat
from . import random_state
from .format import BUFFER, SAFETENSORS, SHOWN, VALUE, Entry, state_kind, tensor_kind
from .regions import Region, whole
from .values import SMALL_BYTES, EncodingError, encode

WORDS = {"module": "the model's extra state", "shared": "the optimizer's settings"}
"""Names of values in messages, where the name in the index says too little."""


class Item(NamedTuple):
    """A range that this rank writes."""

    entry: Entry
    """What the range is. Its place in the file and its checksums are filled in when it is written."""
    read: Callable[[], Tensor]
    """Returns the elements, 1-D, contiguous and of the entry's dtype, on any device. Called once, in order."""


class Contents(NamedTuple):
    """What one rank writes."""

    items: list[Item]
    scalars: dict[str, Any]
    values: dict[str, Any]
    seat: random_state.Seat
    joined_bytes: int = 0
    """Extra host memory that reading needs: for the largest split master, put together from its two halves."""


def name_of(name: str) -> str:
    """A parameter's name without what ``torch.compile`` adds to it.

    >>> name_of("blocks.0._orig_mod.weight")
    'blocks.0.weight'
    """
    return name.replace("_orig_mod.", "")


def region_of(flat: Flat, piece: Piece) -> Region:
    """The elements of the parameter that a piece of a flat has."""
    slot = flat.layout.slots[piece.slot]
    return Region.of_part(slot.box, slot.shape, piece.start, piece.stop)


def written_range(flat: Flat, fabric: Fabric) -> Range:
    """The range of a flat that this rank writes: its shard, or its share of a shard that other ranks have too."""
    shard, replicas, mine = flat.shard_range, fabric.replicas.world, fabric.replicas.rank
    if not flat.divided:  # every rank of tensor parallelism has the same
        replicas, mine = replicas * fabric.model.world, mine * fabric.model.world + fabric.model.rank
    return Range(
        shard.start + shard.numel * mine // replicas,
        shard.start + shard.numel * (mine + 1) // replicas,
    )


def collect(
    runtime: Runtime,
    optimizer: ShardedOptimizer | None,
    *,
    scheduler: Any,
    loader: Any,
    extra: object,
    frozen: bool = True,
) -> Contents:
    """Everything that this rank has to write. Waits for updates under way; no tensor is read yet.

    ``frozen``: whether frozen parameters are written.
    """
    fabric = runtime.fabric
    runtime.check_ready("save()")
    if runtime.optimizer is not None:
        runtime.optimizer.settle("save()")
    items: list[Item] = []
    masters = _Masters()
    scalars: dict[str, Any] = {}
    for unit in runtime.units:
        for flat in unit.flats:
            flat.writes.check()
            if frozen or flat.trainable:
                items += _values_of(flat, fabric, masters)
            if optimizer is not None and flat.trainable:
                items += _states_of(flat, fabric, optimizer)
                scalars |= _scalars(flat, optimizer)
    items += [_whole(name, BUFFER, buffer) for name, buffer in buffers_of(runtime) if writes_buffer(buffer, fabric)]
    others: dict[str, Any] = {"random": random_state.read(fabric.device)}
    if loader is not None:
        others["loader"] = _state_dict(loader, "loader")
    if fabric.rank == 0:
        others |= {"about": _about(runtime), "shared": _shared(runtime, optimizer), "extra": extra}
        others["module"] = extra_states_of(runtime)
        if scheduler is not None:
            others["scheduler"] = _state_dict(scheduler, "scheduler")
    values = {}
    for name, value in others.items():
        large: list[Tensor] = []
        values[name] = encode(value, WORDS.get(name, name), partial(_aside, name, large))
        items += [_whole(f"{name}#{n}", tensor_kind(fabric.rank), tensor) for n, tensor in enumerate(large)]
    items.sort(key=lambda item: -item.entry.dtype.itemsize)  # so that every range lies on a multiple of its elements
    return Contents(items, scalars, values, random_state.Seat.of(fabric), masters.largest)


def _aside(name: str, large: list[Tensor], tensor: Tensor) -> str:
    """Puts a tensor into a list. Returns a name for it."""
    large.append(tensor)
    return f"{name}#{len(large) - 1}"


class _Masters:
    """Puts split masters together from their two halves: one at a time, and each once for all its pieces."""

    def __init__(self) -> None:
        self._flat: Flat | None = None
        self._values: Tensor | None = None
        self.largest = 0
        """Bytes of the largest split master."""

    def expect(self, flat: Flat) -> None:
        if flat.home.joins_master:
            self.largest = max(self.largest, flat.own.numel * flat.master_dtype.itemsize)

    def of(self, flat: Flat) -> Tensor:
        """This flat's master. The pieces of a flat are read one after the other."""
        if self._values is None or self._flat is not flat:
            self._flat = self._values = None
            self._flat, self._values = flat, flat.home.master()
        return self._values


def _values_of(flat: Flat, fabric: Fabric, masters: _Masters) -> Iterator[Item]:
    part = written_range(flat, fabric)
    pieces = flat.layout.pieces(part)
    if fabric.rank == 0:  # parameters without elements have no piece, but are written too
        dtype = flat.master_dtype if flat.trainable else flat.dtype
        for slot in flat.layout.slots:
            if 0 in slot.whole_shape:
                region = Region(whole(slot.whole_shape), 0, 0)
                yield _item(
                    name_of(slot.name), VALUE, slot.whole_shape, region, torch.empty(0, dtype=dtype, device="cpu")
                )
    if not flat.trainable:
        yield from _pieces(
            flat, pieces, VALUE, flat.dtype, lambda: flat.parameters_at_rest, part.start - flat.at_rest.start
        )
        return
    masters.expect(flat)
    offset = part.start - flat.own.start
    yield from _pieces(flat, pieces, VALUE, flat.master_dtype, partial(masters.of, flat), offset)
    if flat.home.held:
        yield from _pieces(flat, pieces, SHOWN, flat.dtype, flat.home.shown, offset)


def _pieces(
    flat: Flat, pieces: Sequence[Piece], kind: str, dtype: torch.dtype, values: Callable[[], Tensor], offset: int
) -> Iterator[Item]:
    """The pieces of a range that begins at ``offset`` in the values."""

    def read(piece: Piece) -> Tensor:
        return values()[offset + piece.offset :][: piece.numel]

    for piece in pieces:
        slot = flat.layout.slots[piece.slot]
        entry = Entry(name_of(slot.name), kind, slot.whole_shape, region_of(flat, piece), dtype)
        yield _storable(Item(entry, partial(read, piece)))


def _states_of(flat: Flat, fabric: Fabric, optimizer: ShardedOptimizer) -> Iterator[Item]:
    owners = {piece.slot: piece for piece in flat.pieces}
    for piece in flat.layout.pieces(written_range(flat, fabric)):
        owner, slot = owners[piece.slot], flat.layout.slots[piece.slot]
        tensor = flat.pieces[owner]
        for name, value in optimizer.piece_states.of(tensor).items():
            if is_elementwise(value, tensor):
                region, kind = region_of(flat, piece), _kind_of_state(name)
                entry = Entry(name_of(slot.name), kind, slot.whole_shape, region, value.dtype)
                yield _storable(Item(entry, partial(_range, value, piece.start - owner.start, piece.numel)))


def _range(values: Tensor, start: int, numel: int) -> Tensor:
    return values.detach()[start : start + numel]


def _kind_of_state(name: object) -> str:
    if not isinstance(name, str):
        raise EncodingError(f"the optimizer has a state called {name!r}, which is no string; call it {str(name)!r}")
    return state_kind(name)


def is_elementwise(value: object, piece: Tensor) -> bool:
    """True if a state has one element for each of the piece's. Other states belong to the parameter as a whole."""
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


def _storable(item: Item) -> Item:
    """Refuses a dtype that safetensors has no name for."""
    name, kind, _, _, dtype, *_ = item.entry
    if dtype not in SAFETENSORS:
        raise EncodingError(
            f"{'parameter' if kind == VALUE else kind} {name!r} is of {dtype}, which a checkpoint cannot hold; "
            "store it in another dtype, or as a buffer of its bits, view(torch.uint8) (complex numbers also as "
            "torch.view_as_real()), or register a buffer with persistent=False"
        )
    return item


def _item(name: str, kind: str, shape: tuple[int, ...], region: Region, values: Tensor) -> Item:
    """An item for a range whose values exist already."""
    return _storable(Item(Entry(name, kind, shape, region, values.dtype), lambda: values.detach().reshape(-1)))


def _whole(name: str, kind: str, tensor: Tensor) -> Item:
    """A tensor that is not in a flat: all that this rank has of it."""
    return _item(name, kind, tuple(tensor.shape), local_region(tensor), parallel.local(tensor))


def local_region(tensor: Tensor) -> Region:
    """The elements of a tensor that this rank has: all of them, unless it is a DTensor."""
    part = parallel.local(tensor)
    return Region.of_part(parallel.box_of(tensor), part.shape, 0, part.numel())


def writes_buffer(buffer: Tensor, fabric: Fabric) -> bool:
    """Whether this rank writes a buffer: rank 0 does. The first rank that has a part of a divided buffer writes it."""
    if parallel.divided(buffer):
        return fabric.shard_rank == 0 and fabric.replicas.rank == 0
    return fabric.rank == 0


def _state_dict(thing: Any, name: str) -> Any:
    if not callable(getattr(thing, "state_dict", None)):
        raise ValueError(
            f"{name}: a {type(thing).__name__} has no state_dict(), so its position cannot be saved; use one that has, "
            f"such as torchdata's StatefulDataLoader, or leave {name}= out and put what you need into extra="
        )
    return thing.state_dict()


def buffers_of(runtime: Runtime) -> list[tuple[str, Tensor]]:
    """The buffers that the model's state dict has, each once."""
    named: dict[str, Any] = runtime.model.state_dict(keep_vars=True)
    extra = {f"{name}._extra_state".removeprefix(".") for name in extra_states_of(runtime)}
    parameters = {id(parameter) for parameter in runtime.model.parameters()}
    found: dict[int, tuple[str, Tensor]] = {}
    for name, value in named.items():
        if isinstance(value, Tensor) and id(value) not in parameters and name_of(name) not in extra:
            found.setdefault(id(value), (name_of(name), value))
    return list(found.values())


def tensors_of(runtime: Runtime) -> int:
    """The number of parameters and buffers that a checkpoint of the model has."""
    return len(list(runtime.model.parameters())) + len(buffers_of(runtime))


def extra_states_of(runtime: Runtime) -> dict[str, Any]:
    """The states of modules that are no tensors (``get_extra_state``), by the module's name."""
    return {
        name_of(name): module.get_extra_state()
        for name, module in runtime.model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


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


def _about(runtime: Runtime) -> dict[str, Any]:
    """A description of the model, so that it can be exported without its code.

    Configuration (Hugging Face's, a dataclass, or none), adapters, and how parameters come from masters.
    """
    model: Any = runtime.model
    adapters = getattr(model, "peft_config", None)
    inner = model.get_base_model() if adapters is not None and hasattr(model, "get_base_model") else model
    dtype = runtime.config.precision.parameters
    flats = [flat for unit in runtime.units for flat in unit.flats]
    return {
        "class": type(inner).__name__,
        "config": _plain(getattr(inner, "config", None)),
        "generation_config": _plain(getattr(inner, "generation_config", None)),
        "adapters": None if adapters is None else {str(name): _plain(config) for name, config in adapters.items()},
        "parameter_dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "rounded_on_host": [
            name_of(slot.name)
            for flat in flats
            if flat.trainable and flat.home.place is Place.HOST
            for slot in flat.layout.slots
        ],
    }


def _plain(config: Any) -> Any:
    """A configuration as JSON values; None if there is none, or JSON cannot express it."""
    try:
        if hasattr(config, "to_json_string"):
            return json.loads(config.to_json_string())
        if hasattr(config, "to_dict"):
            return json.loads(json.dumps(config.to_dict(), default=_listed))
        if dataclasses.is_dataclass(config) and not isinstance(config, type):
            return json.loads(json.dumps(dataclasses.asdict(config)))
    except (TypeError, ValueError):
        return None
    return None


def _listed(value: object) -> Any:
    """Turns sets, which adapters' configurations have, and enumerations into JSON values."""
    if isinstance(value, set | frozenset | tuple):
        return sorted(value, key=str)
    return str(getattr(value, "value", value))
