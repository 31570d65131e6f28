"""``zeroshard.load``: every rank reads the elements that it needs, from a checkpoint of any setup."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..comm import parallel
from ..comm.fabric import Fabric
from ..config.layout import Piece, Range
from ..optim.optimizer import ShardedOptimizer
from ..runtime import Runtime, runtime_of
from ..states.flat import Flat
from ..system import compat
from ..system.words import told
from . import random_state
from .contents import buffers_of, extra_states_of, local_region, name_of, region_of, tensors_of
from .folder import candidates
from .format import BUFFER, SHOWN, VALUE, CheckpointError, InvalidIndexError, state_name
from .frozen import NAME as FROZEN
from .frozen import difference, sums_of, table_of
from .read import CheckpointReader, Index, read_index
from .regions import Region
from .save import check_optimizer, finish_latest, together
from .validate import HOW_TO_COMPUTE, check_fits, check_frozen, check_given, check_index, decoded, demand_on, no_tensor
from .values import decode


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ShardedOptimizer | None = None,
    scheduler: Any = None,
    loader: Any = None,
    *,
    allow_older: bool = False,
    allow_nonfinite: bool = False,
    random: bool = True,
) -> Any:
    """Goes on from a checkpoint, of any stage, world size, offload and precision; returns its ``extra``. Collective.

    Args:
        path: a checkpoint, or a folder of checkpoints, of which the newest complete one is taken.
        model: the model that ``shard()`` returned.
        optimizer: the optimizer that ``shard()`` returned. Without it only the model is loaded.
        scheduler: gets its state back, if one was saved.
        loader: gets this rank's position back. On another number of ranks that works if all ranks saved the same.
        allow_older: in a folder of checkpoints, if the newest is damaged, say so and take the next older checkpoint.
        allow_nonfinite: also load NaN and infinite elements of parameters and of the optimizer's states. They count as
            damage otherwise, because training cannot go on from them.
        random: also set the random generators. If the number of ranks of tensor parallelism changed, these ranks get
            the same state. Parts of the data that the saved run did not have begin with numbers of their own.

    Raises:
        CheckpointError: there is none, it is damaged, or it does not fit the model; says whether the model was touched.
    """
    runtime = runtime_of(model)
    with runtime.fabric.watchdog.during("load()"):
        wanted = _Wanted(runtime, optimizer, scheduler, loader, allow_nonfinite=allow_nonfinite, random=random)
        return _load_newest(path, wanted, allow_older=allow_older)


class _Wanted(NamedTuple):
    """What a load fills, and how."""

    runtime: Runtime
    optimizer: ShardedOptimizer | None
    scheduler: Any
    loader: Any
    allow_nonfinite: bool
    random: bool


def _load_newest(path: str | os.PathLike[str], wanted: _Wanted, *, allow_older: bool) -> Any:
    runtime = wanted.runtime
    fabric = runtime.fabric
    finish_latest(runtime)
    with together(fabric):
        check_optimizer(runtime, wanted.optimizer, "load")
        runtime.check_ready("load()")
        if runtime.optimizer is not None:
            runtime.optimizer.settle("load()")
        folders = candidates(Path(path).absolute())
    folders = fabric.from_rank_zero(folders)
    if not folders:
        raise CheckpointError(f"{path} holds no complete checkpoint")
    for number, folder in enumerate(folders):
        try:
            return _load(folder, wanted)
        except _DamagedError as damage:
            if number + 1 == len(folders) or not allow_older:
                raise CheckpointError(str(damage)) from damage
            if fabric.rank == 0:
                print(f"zeroshard: {damage}; taking the one before, {folders[number + 1]}", flush=True)
    raise AssertionError("the last one is returned or raised")


def read_extra(path: str | os.PathLike[str]) -> Any:
    """The ``extra`` of a checkpoint, or of the newest in a folder whose index can be read. Needs no rank and no model.

    Raises:
        CheckpointError: there is none.
    """
    problem = CheckpointError(f"{path} holds no complete checkpoint")
    for folder in candidates(Path(path).absolute()):
        try:
            return _value(CheckpointReader(read_index(folder)), 0, "extra")
        except CheckpointError as error:
            problem = error
    raise CheckpointError(str(problem)) from problem


class _DamagedError(Exception):
    """A checkpoint is damaged. It is raised on all ranks."""


def _load(folder: Path, wanted: _Wanted) -> Any:
    runtime, optimizer = wanted.runtime, wanted.optimizer
    fabric = runtime.fabric
    with compat.label("zeroshard.load"), torch.no_grad():
        with _usable(fabric, "; nothing was loaded"):
            reader = CheckpointReader(read_index(folder, tensors_of(runtime)))
            if fabric.rank == 0:
                reader.check_files()
            values = _Values.read(reader, fabric)
            check_index(reader.index, values.shared, optimizer)
            check_frozen(reader.index, values.frozen)
            if wanted.random:
                values.check_random(reader.index.file, fabric.device)
        with together(fabric) as here:
            check_fits(reader.index, runtime, optimizer, values.shared, values.frozen)
            here.mine = sums_of(runtime) if values.frozen else {}
        if values.frozen and (text := difference(values.frozen, table_of(runtime, here.all))):
            raise CheckpointError(f"{folder} {text}; nothing was loaded")
        with together(fabric):
            check_given(reader.index, wanted.scheduler, values.scheduler, wanted.loader, fabric, values.predecessor)
        with _usable(fabric, "; nothing was loaded"):
            _verify(reader, wanted, values.frozen)
        with _usable(fabric, "; the model is loaded in part, so load another checkpoint into it"):
            older = _fill(reader, runtime, optimizer, values.frozen)
        _publish(runtime, older)
        with together(fabric):
            if optimizer is not None:
                _take_settings(optimizer, values.shared)
            values.give(wanted)
            runtime.faults.states_loaded()
            if runtime.optimizer is not None:
                runtime.optimizer.states_loaded()
        return values.extra


@contextmanager
def _usable(fabric: Fabric, after: str) -> Iterator[None]:
    """Either all ranks come to the end of the block, or all raise the same error.

    The error is ``_DamagedError`` if the checkpoint is damaged: an older checkpoint may help. Any other error is a
    ``CheckpointError``: an older checkpoint would not help.
    """
    problem = None
    try:
        yield
    except Exception as error:
        problem = error
    damaged = isinstance(problem, CheckpointError)
    text = str(problem) if damaged else f"{type(problem).__name__}: {problem}"
    told = fabric.gather_objects(None if problem is None else (damaged, text))
    failed = [(one, f"rank {rank}: " * (fabric.world > 1) + one[1] + after) for rank, one in enumerate(told) if one]
    for (is_damage, _), message in sorted(failed, key=lambda one: one[0][0]):
        raise (_DamagedError if is_damage else CheckpointError)(message) from problem


# -- values -----------------------------------------------------------------------------------------------------------


def _value(reader: CheckpointReader, rank: int, name: str) -> Any:
    saved = reader.index.parts[rank].values.get(name)
    return decoded(reader.index.file, saved, f"{name} of rank {rank}", partial(reader.tensor_of, rank))


class _Values(NamedTuple):
    """Everything in a checkpoint that is no tensor of the model or optimizer."""

    shared: dict[str, Any]
    modules: dict[str, Any]
    scheduler: Any
    loader: Any
    extra: Any
    random: dict[str, Any]
    frozen: dict[str, Any]
    """The frozen parameters that the checkpoint leaves out, by name."""
    predecessor: random_state.Predecessor
    """The rank of the saved run that had this loader position and these random numbers."""

    @classmethod
    def read(cls, reader: CheckpointReader, fabric: Fabric) -> _Values:
        """Reads and checks the values."""
        seats = [random_state.Seat(*part.seat) for part in reader.index.parts]
        before = random_state.predecessor_of(random_state.Seat.of(fabric), fabric.world, seats)
        made = cls(
            shared=_value(reader, 0, "shared"),
            modules=_value(reader, 0, "module"),
            scheduler=_value(reader, 0, "scheduler"),
            loader=_value(reader, before.rank, "loader"),
            extra=_value(reader, 0, "extra"),
            random=_value(reader, before.rank, "random"),
            frozen=_value(reader, 0, FROZEN) or {},
            predecessor=before,
        )
        if not all(isinstance(table, dict) for table in (made.shared, made.modules, made.random)):
            raise CheckpointError(f"{reader.index.file} lacks what every rank saves beside tensors")
        return made

    def check_random(self, file: Path, device: torch.device) -> None:
        """Tries the random state."""
        try:
            random_state.check(self.random, device)
        except Exception as error:  # three libraries raise errors of any type
            raise InvalidIndexError(
                f"{file}: random of rank {self.predecessor.rank} is no state of random generators, "
                f"{told(error)}; load it with random=False"
            ) from error

    def give(self, wanted: _Wanted) -> None:
        """Gives modules, scheduler, loader and random generators their states."""
        runtime, scheduler, loader, random = wanted.runtime, wanted.scheduler, wanted.loader, wanted.random
        modules = {name_of(name): module for name, module in runtime.model.named_modules()}
        for name in extra_states_of(runtime):
            if name in self.modules:
                modules[name].set_extra_state(self.modules[name])
        for name, thing, state in (("scheduler", scheduler, self.scheduler), ("loader", loader, self.loader)):
            if thing is not None:
                _give_state(name, thing, state)
        if random and self.predecessor.new:
            random_state.begin_anew(self.random, runtime.fabric.data_rank)
        elif random:
            random_state.restore(self.random, runtime.fabric.device)


def _give_state(name: str, thing: Any, state: Any) -> None:
    try:
        thing.load_state_dict(state)
    except Exception as error:
        kind = type(thing).__name__
        raise CheckpointError(
            f"{name}: {kind}.load_state_dict() does not take what was saved, {told(error)}; model "
            f"and optimizer are loaded, the {name} is not. Was it of another kind? Give that, or leave {name}= out"
        ) from error


def _take_settings(optimizer: ShardedOptimizer, shared: dict[str, Any]) -> None:
    """Takes the settings of groups, the counts, and the states that belong to no parameter."""
    for mine, theirs in zip(optimizer.param_groups, shared["groups"], strict=True):
        mine.update({key: value for key, value in theirs["settings"].items() if key not in HOW_TO_COMPUTE})
    optimizer.piece_states.take_common(shared["common"])
    optimizer.load_progress(shared["progress"])


# -- tensors ----------------------------------------------------------------------------------------------------------


def _verify(reader: CheckpointReader, wanted: _Wanted, left_out: Container[str]) -> None:
    """Reads all chunks that ``_fill`` is going to read, before anything is written to the model.

    Every checksum must be right, and training must be able to go on from the elements. ``_fill`` reads the chunks once
    more. That costs less than memory for two models.
    """
    for name, kind, region in _ranges(reader.index, wanted.runtime, wanted.optimizer):
        if name in left_out:
            continue
        demand = demand_on(kind, wanted.optimizer, allow_nonfinite=wanted.allow_nonfinite)
        reader.verify(name, kind, region, demand.flaw_of)


def _ranges(index: Index, runtime: Runtime, optimizer: ShardedOptimizer | None) -> Iterator[tuple[str, str, Region]]:
    """Name, kind and region of everything that this rank reads."""
    for flat in _flats(runtime):
        kinds = [VALUE]
        if optimizer is not None and flat.trainable:
            for piece in flat.pieces:
                name = name_of(flat.layout.slots[piece.slot].name)
                for kind in index.kinds[name]:
                    if state_name(kind) is not None:
                        yield name, kind, region_of(flat, piece)
            if flat.home.delays and _has_older(index, flat):
                kinds.append(SHOWN)
        for kind in kinds:
            for piece in flat.layout.pieces(flat.own if flat.trainable else flat.at_rest):
                yield *_stored(index, flat, kind, piece), region_of(flat, piece)
    for name, buffer in buffers_of(runtime):
        yield name, BUFFER, local_region(buffer)


def _stored(index: Index, flat: Flat, kind: str, piece: Piece) -> tuple[str, str]:
    """Name and kind under which a piece is stored.

    The saved run may have had other units. So perhaps only some parameters of a flat have an older value.
    """
    name = name_of(flat.layout.slots[piece.slot].name)
    return name, kind if (name, kind) in index.places else VALUE


def _fill(
    reader: CheckpointReader, runtime: Runtime, optimizer: ShardedOptimizer | None, left_out: Container[str]
) -> dict[Flat, Tensor]:
    """Reads all tensors that this rank needs but those left out. Nothing is communicated: ranks may fail one by one.

    Returns the older parameters that the next step runs on, of flats whose update waits to be published.
    """
    older: dict[Flat, Tensor] = {}
    if optimizer is not None:
        optimizer.piece_states.forget()
    for flat in _flats(runtime):
        _fill_values(reader, flat, left_out)
        if optimizer is not None and flat.trainable:
            _fill_states(reader, flat, optimizer)
            if flat.home.delays and _has_older(reader.index, flat):
                older[flat] = torch.zeros(flat.own.numel, device="cpu")
                _read_range(reader, flat, SHOWN, flat.own, older[flat])
    for name, buffer in buffers_of(runtime):
        part = parallel.local(buffer.data)
        target = torch.empty(part.numel(), dtype=part.dtype, device=part.device)
        reader.read(name, BUFFER, local_region(buffer), target)
        _write(part, target.view(part.shape))
    return older


def _write(tensor: Tensor, values: Tensor) -> None:
    """Copies values into a tensor. The tensor may be made by ``expand()``, so that elements share memory."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


def _fill_values(reader: CheckpointReader, flat: Flat, left_out: Container[str]) -> None:
    if not flat.trainable:
        _read_range(reader, flat, VALUE, flat.at_rest, flat.parameters_at_rest, left_out)
        return
    values = flat.home.loading()
    _read_range(reader, flat, VALUE, flat.own, values)
    flat.home.adopt(values)


def _fill_states(reader: CheckpointReader, flat: Flat, optimizer: ShardedOptimizer) -> None:
    index, keeper = reader.index, optimizer.piece_states.of_flat(flat)
    for piece in flat.pieces:
        name, region = name_of(flat.layout.slots[piece.slot].name), region_of(flat, piece)
        moments = {kind: state for kind in index.kinds[name] if (state := state_name(kind)) is not None}
        for kind, state in moments.items():
            target = keeper.room_for(piece, state, index.dtype(name, kind))
            assert target is not None, f"{state!r} of {name!r}: a state that does not fit was refused before"
            reader.read(name, kind, region, target)
        scalars = decode(index.scalars.get(name, {}), f"the state of {name!r}", no_tensor)
        keeper.take_scalars(piece, scalars, moments=bool(moments))


def _read_range(
    reader: CheckpointReader, flat: Flat, kind: str, part: Range, target: Tensor, left_out: Container[str] = ()
) -> None:
    for piece in flat.layout.pieces(part):
        name, stored = _stored(reader.index, flat, kind, piece)
        if name in left_out:
            continue
        reader.read(name, stored, region_of(flat, piece), target[piece.offset : piece.offset + piece.numel])


def _publish(runtime: Runtime, older: dict[Flat, Tensor]) -> None:
    """Shows the loaded parameters. With a held update these are the older ones, which the next step runs on."""
    for flat in _flats(runtime):
        if flat not in older:
            flat.publish()
            continue
        newest = flat.home.master().clone()
        flat.home.adopt(older[flat])
        flat.publish()
        flat.wait_if_whole()
        flat.home.hold(newest)


def _has_older(index: Index, flat: Flat) -> bool:
    return any((name_of(slot.name), SHOWN) in index.places for slot in flat.layout.slots)


def _flats(runtime: Runtime) -> list[Flat]:
    return [flat for unit in runtime.units for flat in unit.flats]
