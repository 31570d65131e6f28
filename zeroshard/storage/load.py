"""``zeroshard.load``: every rank reads what it keeps, whatever the setup that wrote it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..comm.fabric import Fabric
from ..optim.optimizer import ShardedOptimizer
from ..runtime import Runtime, runtime_of
from ..states.flat import Flat
from ..system import compat
from . import random_state
from .agreement import agree
from .checked import check_index, decoded
from .contents import buffers_of, extra_states_of
from .fill import fill, load_settings, publish
from .folder import candidates
from .format import BUFFER, INDEX, CheckpointError, InvalidIndexError, state_name, tensor_kind
from .index import Index, read_index
from .names import name_of
from .read import Reader
from .save import check_optimizer, finish_latest
from .values import TAG

NAMES_IN_A_MESSAGE = 3


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ShardedOptimizer | None = None,
    scheduler: Any = None,
    loader: Any = None,
    *,
    allow_older: bool = False,
    random: bool = True,
) -> Any:
    """Goes on from a checkpoint, of any stage, world size, offload and precision; returns its ``extra``. Collective.

    Args:
        path: a checkpoint, or a folder of them, of which the newest complete one is taken.
        model: what ``shard()`` returned.
        optimizer: likewise; without it only the model is loaded.
        scheduler: gets its state back, if one was saved.
        loader: gets this rank's position back. On another number of ranks that works where all saved the same.
        allow_older: in a folder of checkpoints, where the newest is damaged, say so and take the one before.
        random: set the random generators too. Ranks of tensor parallelism get the same, where their
            number changed; parts of the data that the saved run did not have begin with numbers of their own.

    Raises:
        CheckpointError: there is none, it is damaged, or it does not fit the model; says whether the model was touched.
    """
    runtime = runtime_of(model)
    fabric = runtime.fabric
    finish_latest(runtime)
    folders: list[Path] = []
    problem: Exception | None = None
    try:
        check_optimizer(runtime, optimizer, "load")
        runtime.check_no_block_open("load()")
        if runtime.optimizer is not None:
            runtime.optimizer.settle("load()")
        folders = candidates(Path(path).absolute())
    except Exception as error:
        problem = error
    agree(fabric, problem)
    folders = fabric.from_rank_zero(folders)
    if not folders:
        raise CheckpointError(f"{path} holds no complete checkpoint")
    for number, folder in enumerate(folders):
        last = number + 1 == len(folders) or not allow_older
        try:
            return _load(folder, runtime, optimizer, scheduler, loader, random)
        except _DamagedError as unusable:
            if last:
                raise CheckpointError(str(unusable)) from unusable
            if fabric.rank == 0:
                print(f"zeroshard: {unusable}; taking the one before, {folders[number + 1]}", flush=True)
    raise AssertionError("the last one is returned or raised")


def read_extra(path: str | os.PathLike[str]) -> Any:
    """The ``extra`` of a checkpoint, or of the newest in a folder whose index can be read. No rank and no model needed.

    Raises:
        CheckpointError: there is none.
    """
    problem: Exception = CheckpointError(f"{path} holds no complete checkpoint")
    for folder in candidates(Path(path).absolute()):
        try:
            reader = Reader(read_index(folder))
            return decoded(folder / INDEX, reader.index.values.get("extra"), "extra", partial(reader.tensor_of, 0))
        except CheckpointError as error:
            problem = error
    raise CheckpointError(str(problem)) from problem


class _DamagedError(Exception):
    """A checkpoint is damaged; all ranks know."""


def _load(
    folder: Path, runtime: Runtime, optimizer: ShardedOptimizer | None, scheduler: Any, loader: Any, random: bool
) -> Any:
    fabric = runtime.fabric
    with compat.label("zeroshard.load"), torch.no_grad():
        reader: Reader | None = None
        values: _Values | None = None
        problem: Exception | None = None
        try:
            reader = Reader(read_index(folder))
            if fabric.rank == 0:
                reader.check_files()
            values = _Values.read(reader, fabric)
            check_index(reader.index, values.shared, optimizer)
            if random:
                values.check_random(reader.index.folder / INDEX, fabric)
        except Exception as error:  # of whatever type: the other ranks are told, not left waiting
            problem = error
        _agree_usable(fabric, problem, "; nothing was loaded")
        assert reader is not None
        assert values is not None
        try:
            _check_fits(reader.index, runtime, optimizer, values.shared)
            _check_given(reader.index, scheduler, loader, fabric)
        except Exception as error:
            problem = error
        agree(fabric, problem)
        older: dict[Flat, Tensor] = {}
        try:
            older = fill(reader, runtime, optimizer)
        except Exception as error:
            problem = error
        _agree_usable(fabric, problem, "; the model is loaded in part, so load another checkpoint into it")
        publish(runtime, older)
        try:
            if optimizer is not None:
                load_settings(optimizer, values.shared)
            values.give(runtime, scheduler, loader, random)
            runtime.faults.states_loaded()
            if runtime.optimizer is not None:
                runtime.optimizer.check_replicas = True
        except Exception as error:
            problem = error
        agree(fabric, problem)
        return values.extra


class _Values(NamedTuple):
    """All that is no tensor of the model or optimizer."""

    shared: dict[str, Any]
    modules: dict[str, Any]
    scheduler: Any
    loader: Any
    extra: Any
    random: dict[str, Any]
    source: random_state.Source
    """The rank of the run that saved whose loader and random numbers these are."""

    @classmethod
    def read(cls, reader: Reader, fabric: Fabric) -> _Values:
        """Reads and checks them."""
        source = _source(reader.index, fabric)

        def value(rank: int, name: str) -> Any:
            saved = reader.index.parts[rank].values.get(name)
            file, where = reader.index.folder / INDEX, f"{name} of rank {rank}"
            return decoded(file, saved, where, partial(reader.tensor_of, rank))

        made = cls(
            shared=value(0, "shared"),
            modules=value(0, "module"),
            scheduler=value(0, "scheduler"),
            loader=value(source.rank, "loader"),
            extra=value(0, "extra"),
            random=value(source.rank, "random"),
            source=source,
        )
        if not all(isinstance(table, dict) for table in (made.shared, made.modules, made.random)):
            raise CheckpointError(f"{reader.index.folder / INDEX} lacks what every rank saves beside tensors")
        return made

    def check_random(self, file: Path, fabric: Fabric) -> None:
        """Tries the random state, on generators of nobody's."""
        try:
            random_state.check(self.random, fabric.device)
        except Exception as error:  # of whatever type: it comes from three libraries
            raise InvalidIndexError(
                f"{file}: random of rank {self.source.rank} is no state of random generators, {type(error).__name__}: "
                f"{error}; load it with random=False"
            ) from error

    def give(self, runtime: Runtime, scheduler: Any, loader: Any, random: bool) -> None:
        """Lets everybody go on from their state."""
        modules = {name_of(name): module for name, module in runtime.model.named_modules()}
        for name in extra_states_of(runtime):
            if name in self.modules:
                modules[name].set_extra_state(self.modules[name])
        for name, thing, state in (("scheduler", scheduler, self.scheduler), ("loader", loader, self.loader)):
            if thing is not None:
                _give_state(name, thing, state)
        if random and self.source.new:
            random_state.begin_anew(self.random, runtime.fabric.data_rank)
        elif random:
            random_state.restore(self.random, runtime.fabric.device)


def _give_state(name: str, thing: Any, state: Any) -> None:
    try:
        thing.load_state_dict(state)
    except Exception as error:
        kind = type(thing).__name__
        raise CheckpointError(
            f"{name}: {kind}.load_state_dict() does not take what was saved, {type(error).__name__}: {error}; model "
            f"and optimizer are loaded, the {name} is not. Was it of another kind? Give that, or leave {name}= out"
        ) from error


def _source(index: Index, fabric: Fabric) -> random_state.Source:
    places = []
    for rank, part in enumerate(index.parts):
        place = part.values.get("place", [rank, 0, 1])  # older ones do not say
        if (
            not isinstance(place, list)
            or len(place) != 3
            or any(type(number) is not int or number < 0 for number in place)
        ):
            raise CheckpointError(f"{index.folder} does not say where rank {rank} stood: {place!r}")
        places.append(random_state.Seat(*place))
    return random_state.source_of(random_state.Seat.of(fabric), fabric.world, places)


def _agree_usable(fabric: Fabric, problem: Exception | None, after: str) -> None:
    """Raises on all ranks, and the same: that it is damaged, or what else went wrong, which no older one would mend."""
    damaged = isinstance(problem, CheckpointError)
    text = str(problem) if damaged else f"{type(problem).__name__}: {problem}"
    told = fabric.gather_objects(None if problem is None else (damaged, text))
    failed = [(one, f"rank {rank}: " * (fabric.world > 1) + one[1] + after) for rank, one in enumerate(told) if one]
    for (is_damage, _), message in sorted(failed, key=lambda one: one[0][0]):
        raise (_DamagedError if is_damage else CheckpointError)(message) from problem


# -- before anything is touched ---------------------------------------------------------------------------------------


def _check_fits(index: Index, runtime: Runtime, optimizer: ShardedOptimizer | None, shared: dict[str, Any]) -> None:
    wanted = {name_of(name): tuple(p.shape) for name, p in runtime.model.named_parameters()}
    buffers = {name: tuple(buffer.shape) for name, buffer in buffers_of(runtime)}
    stored = {name: index.shape(name) for name in index.kinds}
    stored_buffers = {name: index.shape(name, kind) for name, kind in index.places if kind == BUFFER}
    for what, ours, theirs in (("parameter", wanted, stored), ("buffer", buffers, stored_buffers)):
        missing, unknown = [n for n in ours if n not in theirs], [n for n in theirs if n not in ours]
        if missing:
            raise CheckpointError(f"{index.folder} lacks {what} {_some(missing)} of the model; nothing was loaded")
        if unknown:
            raise CheckpointError(
                f"{index.folder} has {what} {_some(unknown)}, which the model has not; nothing was loaded"
            )
        for name, shape in ours.items():
            if theirs[name] != shape:
                raise CheckpointError(
                    f"{index.folder} has {what} {name!r} of shape {list(theirs[name])}, the model of {list(shape)}; "
                    "nothing was loaded"
                )
    if optimizer is None:
        return
    if not shared:
        raise CheckpointError(f"{index.folder} has no optimizer; load it with optimizer=None. Nothing was loaded")
    kind = type(optimizer.unsharded).__name__
    if shared["optimizer"] != kind:
        raise CheckpointError(
            f"{index.folder} was saved with {shared['optimizer']}, and this run has {kind}, whose states differ; "
            "nothing was loaded"
        )
    names = {id(p): name_of(name) for name, p in runtime.model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    saved: list[list[str]] = [group["parameters"] for group in shared["groups"]]
    if groups != saved:
        raise CheckpointError(
            f"{index.folder} has the optimizer's groups divided otherwise ({[len(group) for group in saved]} "
            f"parameters, here {[len(group) for group in groups]}); build it with the same groups. Nothing was loaded"
        )
    for name, kind in index.places:
        state = state_name(kind)
        if state is not None and not optimizer.piece_states.takes(state):
            raise CheckpointError(
                f"{index.folder} has {state!r} of {name!r}, which the host's optimizer has not; load it without "
                "offload. Nothing was loaded"
            )


def _check_given(index: Index, scheduler: Any, loader: Any, fabric: Fabric) -> None:
    for name, thing, there in (
        ("scheduler", scheduler, "scheduler" in index.values),
        ("loader", loader, all("loader" in part.values for part in index.parts)),
    ):
        if thing is not None and not there:
            raise CheckpointError(f"{index.folder} has no {name}, so leave {name}= out; nothing was loaded")
        if thing is not None and not callable(getattr(thing, "load_state_dict", None)):
            raise CheckpointError(f"{name}: a {type(thing).__name__} has no load_state_dict(); nothing was loaded")
    if loader is not None and _source(index, fabric).rearranged:
        first, *others = (_position(index, rank) for rank in range(len(index.parts)))
        if any(other != first for other in others):
            raise CheckpointError(
                f"{index.folder} holds the data's position of {len(index.parts)} ranks, each its own, and this run has "
                f"{fabric.world}, or divides the model otherwise; leave loader= out, and set the position yourself. "
                "Nothing was loaded"
            )


def _position(index: Index, rank: int) -> Any:
    """A rank's loader as it was saved, with what large tensors hold in place of their names."""
    part = index.parts[rank]
    held = {
        entry.name: (entry.shape, entry.dtype, entry.checksums)
        for entry in part.entries
        if entry.kind == tensor_kind(rank)
    }

    def shown(value: Any) -> Any:
        if isinstance(value, list):
            return [shown(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        if value.get(TAG) == "large":
            return held.get(str(value.get("name")))
        return {key: shown(entry) for key, entry in value.items()}

    return shown(part.values["loader"])


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:NAMES_IN_A_MESSAGE]))
    more = len(names) - NAMES_IN_A_MESSAGE
    return f"{shown} and {more} more" if more > 0 else shown
