"""Refuses a checkpoint that makes no sense, or does not fit the model, before anything is written to the model.

Checksums find damage by chance. An index that somebody edited has the right checksums. So every value that is used
later is checked here: its parts, its type, and that a number is finite. An error names the file and the entry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..comm.fabric import Fabric
from ..config.optimizers import (
    AMOUNT,
    FINITE,
    NOT_NEGATIVE,
    OF_SCHEDULERS,
    SCALARS,
    SUPPORTED,
    Bounds,
    States,
)
from ..optim.optimizer import ShardedOptimizer
from ..runtime import Runtime
from ..system.words import line, quoted
from .contents import buffers_of, name_of
from .elements import Demand
from .format import BUFFER, SHOWN, VALUE, CheckpointError, InvalidIndexError, Part, state_name, tensor_kind, title
from .random_state import Predecessor
from .read import Index
from .values import EncodingError, decode

HOW_TO_COMPUTE = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Settings that say how an optimizer computes, not what. The run that loads uses its own."""
NAMES_IN_A_MESSAGE = 3
MOST_STATES = 16
"""More states than any optimizer has for a parameter."""
STEP_DTYPES = (torch.float32, torch.float64)
"""The dtypes in which torch's optimizers count steps. Others count only to a few hundred."""

T = TypeVar("T")


def decoded(file: Path, value: Any, where: str, large: Callable[[str], Tensor]) -> Any:
    """The value that a part of an index stands for. Raises InvalidIndexError."""
    try:
        return decode(value, where, large)
    except EncodingError as error:
        raise InvalidIndexError(f"{file}: {error}") from error


def no_tensor(name: str) -> Tensor:
    """Raises. Given to ``decoded`` for values that have no large tensor."""
    raise EncodingError(f"there is a large tensor, {quoted(name)}, where none can be")


@dataclass(frozen=True)
class Node:
    """A value of an index, and where it stands there. A method raises if the value is not what the method asks for."""

    file: Path
    where: str
    value: Any

    def fault(self, wanted: str) -> InvalidIndexError:
        return InvalidIndexError(f"{self.file}: {line(self.where)} is {quoted(self.value, 60)}, not {wanted}")

    def must(self, good: bool, wanted: str) -> None:
        if not good:
            raise self.fault(wanted)

    def of(self, kind: type[T], wanted: str) -> T:
        """The value, which must be of this type."""
        if not isinstance(self.value, kind):
            raise self.fault(wanted)
        return self.value

    def __getitem__(self, key: str) -> Node:
        if key not in self.table():
            raise InvalidIndexError(f"{self.file}: {self.where} lacks {key!r}")
        return Node(self.file, f"{self.where}.{key}", self.value[key])

    def __iter__(self) -> Iterator[Node]:
        self.must(isinstance(self.value, list | tuple), "a list")
        return iter([Node(self.file, f"{self.where}[{n}]", entry) for n, entry in enumerate(self.value)])

    def optional(self, key: str) -> Node | None:
        """An entry of a table; None if it is missing or None."""
        return None if self.table().get(key) is None else self[key]

    def table(self) -> dict[Any, Any]:
        return self.of(dict, "a table")

    def text(self) -> str:
        return self.of(str, "a string")

    def texts(self) -> list[str]:
        return [entry.text() for entry in self]

    def count(self) -> None:
        self.must(type(self.value) is int and 0 <= self.value < 2**63, "a count")

    def number(self, bounds: Bounds = FINITE) -> Any:
        """A number, or a tensor of one element."""
        value = self.value
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            value = value.item()
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        self.must(is_number and value == value, "a number")
        self.must(bounds.allow(value), str(bounds))
        return value


# -- the checkpoint by itself -----------------------------------------------------------------------------------------


def check_index(index: Index, shared: Any, optimizer: ShardedOptimizer | None) -> None:
    """Checks dtypes and what ranks share of an optimizer; for an optimizer to load, also its states and settings.

    Raises:
        InvalidIndexError: something is missing, or of a kind that would break training later.
    """
    for name, kinds in index.kinds.items():
        for kind in kinds:
            if kind in (VALUE, SHOWN):
                _check_floating(index, name, kind)
    if not shared:  # the model alone was saved
        return
    node = Node(index.file, "shared", shared)
    _check_shared(node)
    if optimizer is None or type(optimizer.unsharded).__name__ != node["optimizer"].value:
        return
    known = SUPPORTED.get(type(optimizer.unsharded))
    scalars = Node(index.file, "scalars", index.scalars)
    for name in scalars.table():
        if name not in index.kinds:
            raise InvalidIndexError(f"{index.file}: scalars has {quoted(name)}, which is no parameter")
    for group, mine in zip(node["groups"], optimizer.param_groups, strict=False):
        _check_settings(group["settings"], mine, optimizer.defaults, known)
        for name in dict.fromkeys(group["parameters"].texts()):
            _check_states(index, name, scalars, known, group["settings"].value)


def _check_floating(index: Index, name: str, kind: str) -> None:
    if not index.dtype(name, kind).is_floating_point:
        raise InvalidIndexError(
            f"{index.file}: {title(name, kind)} is of {index.dtype(name, kind)}, not of floating-point numbers"
        )


def _check_shared(shared: Node) -> None:
    shared["optimizer"].text()
    for group in shared["groups"]:
        if "params" in group["settings"].table():
            raise group["settings"]["params"].fault("a setting: parameters have no place there")
        group["parameters"].texts()
    shared["common"].table()
    progress = shared["progress"]
    progress["steps"].count()
    progress["skipped_steps"].count()
    if (scale := progress["loss_scale"]).value is not None:
        scale["scale"].must(scale["scale"].number() > 0, "above 0")
        scale["good_steps"].count()
        if "overflows" in scale.table():  # older checkpoints do not count them
            scale["overflows"].count()
    if (host := progress["host"]).value is not None:
        host["delaying"].count()
        host["micro_batches"].count()


def _check_settings(settings: Node, mine: Mapping[str, Any], defaults: Mapping[str, Any], known: States | None) -> None:
    """Settings that this optimizer knows must be of the types of its own, and numbers with which it can step.

    Of an optimizer that is not torch's own, only the learning rate is known.
    """
    names = {"lr"} if known is None else defaults.keys() | OF_SCHEDULERS
    for key in names & settings.table().keys() - HOW_TO_COMPUTE:
        there, here = settings[key], mine.get(key, 0.0 if key in OF_SCHEDULERS else None)
        bounds = FINITE if known is None else known.bounds_of(key)
        if isinstance(there.value, bool) and isinstance(here, int):  # torch takes True for 1
            continue
        if isinstance(here, bool):
            there.must(isinstance(there.value, int), "True or False")
        elif isinstance(here, int | float | Tensor):
            there.number(bounds)
        elif isinstance(here, tuple | list):
            there.must(isinstance(there.value, tuple | list) and len(there.value) == len(here), f"{len(here)} numbers")
            for entry in there:
                entry.number(bounds)


def _check_states(index: Index, name: str, scalars: Node, known: States | None, settings: Mapping[str, Any]) -> None:
    """A parameter must have every state that is expected, or no state at all if it has made no step."""
    moments = {state: kind for kind in index.kinds.get(name, ()) if (state := state_name(kind)) is not None}
    where = f"scalars of {quoted(name)}"
    own = Node(scalars.file, where, decoded(scalars.file, scalars.value.get(name, {}), where, no_tensor))
    own.table()
    if len(moments) > MOST_STATES:  # each takes as much memory as the parameter
        raise InvalidIndexError(f"{scalars.file}: {quoted(name)} has {len(moments)} states, more than any optimizer")
    if known is None:  # not torch's own optimizer: its states are not known here
        return
    for kind in moments.values():
        _check_floating(index, name, kind)
    if not moments and not own.value:
        return
    expected = known.under(settings)
    for state in expected:
        if state in SCALARS:
            _check_scalar(state, own[state])
        elif state not in moments:
            raise InvalidIndexError(
                f"{scalars.file}: {quoted(name)} lacks {state!r}, which the optimizer has had for it"
            )
    for state in own.value.keys() & {*known.always, *known.by_setting.values()} - SCALARS:
        raise own[state].fault("a scalar: the state has one element for each of the parameter's")


def _check_scalar(state: str, node: Node) -> None:
    """A state that belongs to a parameter as a whole must be a tensor, with a number that steps can go on from."""
    number = node.number()
    node.must(state != "step" or (0 <= number < 2**53 and number == int(number)), "a count of steps")
    node.must(number >= 0, str(AMOUNT))
    node.must(isinstance(node.value, Tensor) and node.value.dtype in STEP_DTYPES, "a tensor of fp32")


def demand_on(kind: str, optimizer: ShardedOptimizer | None, *, allow_nonfinite: bool) -> Demand:
    """What the elements of a range must be, so that this optimizer can go on with them."""
    known = optimizer is not None and type(optimizer.unsharded) in SUPPORTED
    return Demand.of(kind, not_negative=known and state_name(kind) in NOT_NEGATIVE, allow_nonfinite=allow_nonfinite)


def check_frozen(index: Index, frozen: object) -> None:
    """Checks the table of parameters that a checkpoint leaves out.

    Raises:
        InvalidIndexError: the table makes no sense.
    """
    node = Node(index.file, "frozen", frozen)
    for name in node.table():
        node.must(isinstance(name, str) and name not in index.kinds, "parameters that the checkpoint leaves out")
        for size in node[name]["shape"]:
            size.count()
        node[name]["dtype"].text()
        node[name]["sum"].text()


def check_about(index: Index) -> dict[str, Any]:
    """Returns the description of the model in a checkpoint, for an export.

    Raises:
        InvalidIndexError: the description makes no sense.
    """
    about = decoded(index.file, index.values.get("about"), "about", no_tensor)
    node = Node(index.file, "about", about)
    for key in ("config", "generation_config", "adapters"):
        if (found := node.optional(key)) is not None:
            found.table()
    Node(index.file, "about.adapters", list(node.table().get("adapters") or ())).texts()
    node["class"].text()
    node["rounded_on_host"].texts()
    if (dtype := node.optional("parameter_dtype")) is not None:
        dtype.text()
    try:
        json.dumps(about)
    except (TypeError, ValueError) as error:
        raise InvalidIndexError(f"{index.file}: about is no JSON, {line(str(error), 200)}") from error
    return node.table()


# -- the checkpoint and this run --------------------------------------------------------------------------------------


def check_fits(
    index: Index,
    runtime: Runtime,
    optimizer: ShardedOptimizer | None,
    shared: dict[str, Any],
    frozen: Mapping[str, Any],
) -> None:
    """Model and optimizer must have the parameters, buffers, groups and states of the checkpoint.

    ``frozen``: parameters that the checkpoint leaves out.

    Raises:
        CheckpointError: they differ.
    """
    wanted = {name_of(name): tuple(p.shape) for name, p in runtime.model.named_parameters()}
    buffers = {name: tuple(buffer.shape) for name, buffer in buffers_of(runtime)}
    stored = {name: index.shape(name) for name in index.kinds}
    stored |= {name: tuple(entry["shape"]) for name, entry in frozen.items()}
    stored_buffers = {name: index.shape(name, kind) for name, kind in index.places if kind == BUFFER}
    for what, ours, theirs in (("parameter", wanted, stored), ("buffer", buffers, stored_buffers)):
        if missing := [name for name in ours if name not in theirs]:
            raise _unfit(index, f"lacks {what} {_some(missing)} of the model")
        if unknown := [name for name in theirs if name not in ours]:
            raise _unfit(index, f"has {what} {_some(unknown)}, which the model has not")
        for name, shape in ours.items():
            if theirs[name] != shape:
                raise _unfit(
                    index, f"has {what} {name!r} of shape {quoted(list(theirs[name]))}, the model of {list(shape)}"
                )
    if optimizer is None:
        return
    if not shared:
        raise _unfit(index, "has no optimizer; load it with optimizer=None")
    kind = type(optimizer.unsharded).__name__
    if shared["optimizer"] != kind:
        raise _unfit(
            index, f"was saved with {line(shared['optimizer'], 60)}, and this run has {kind}, whose states differ"
        )
    names = {id(p): name_of(name) for name, p in runtime.model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    saved: list[list[str]] = [group["parameters"] for group in shared["groups"]]
    if groups != saved:
        raise _unfit(
            index,
            f"has the optimizer's groups divided otherwise ({quoted([len(group) for group in saved])} parameters, "
            f"here {quoted([len(group) for group in groups])}); build it with the same groups",
        )
    for name, kind in index.places:
        state = state_name(kind)
        if state is not None and not optimizer.piece_states.takes(state):
            raise _unfit(
                index,
                f"has {quoted(state)} of {quoted(name)}, which the host's optimizer has not; load it without offload",
            )


def check_given(
    index: Index, scheduler: Any, state: Any, loader: Any, fabric: Fabric, predecessor: Predecessor
) -> None:
    """Scheduler and loader must be able to take a state, and the checkpoint must have one for them.

    ``state``: the scheduler's, which may have no entry that the scheduler has not now.

    Raises:
        CheckpointError: a state is missing, has too much, or belongs to another number of ranks.
    """
    for name, thing, there in (
        ("scheduler", scheduler, "scheduler" in index.values),
        ("loader", loader, all("loader" in part.values for part in index.parts)),
    ):
        if thing is not None and not there:
            raise _unfit(index, f"has no {name}, so leave {name}= out")
        if thing is not None and not callable(getattr(thing, "load_state_dict", None)):
            raise CheckpointError(f"{name}: a {type(thing).__name__} has no load_state_dict(); nothing was loaded")
    if isinstance(scheduler, LRScheduler):  # any other class takes its state in its own way
        _check_entries(index, "scheduler", state, scheduler.state_dict(), type(scheduler))
    if loader is not None and predecessor.rearranged:
        first, *others = map(_position, index.parts)
        if any(other != first for other in others):
            raise _unfit(
                index,
                f"holds the data's position of {len(index.parts)} ranks, each its own, and this run has "
                f"{fabric.world}, or divides the model otherwise; leave loader= out, and set the position yourself",
            )


def _check_entries(index: Index, where: str, theirs: Any, mine: Any, kind: type) -> None:
    """Refuses entries that the scheduler has not now, and entries of another kind than now.

    torch's schedulers take every entry as an attribute: an entry called ``step`` would replace a method. A class of the
    user may add entries after its first step, so there only entries that replace a method are refused.
    """
    if mine is None or theirs is None:  # a value that is not known yet
        return
    if _kind_of(theirs) is not _kind_of(mine):
        raise _unfit(
            index,
            f"has {where} that is {quoted(theirs, 60)}, where this run has {quoted(mine, 60)}. Was it of another kind? "
            "Give that, or leave scheduler= out",
        )
    if isinstance(mine, dict):
        of_torch = kind.__module__.startswith("torch.")
        unknown = [key for key in theirs if key not in mine]
        if refused := [key for key in unknown if of_torch or callable(getattr(kind, str(key), None))]:
            raise _unfit(
                index,
                f"has {where} with {_some(refused)}, which the {where} of this run has not. Was it of another kind? "
                "Give that, or leave scheduler= out",
            )
        for key in theirs.keys() & mine.keys():
            if not isinstance(mine[key], dict) and key != "lr_lambdas":  # tables, and objects of the user, may change
                _check_entries(index, f"{where}.{key}", theirs[key], mine[key], kind)
    elif isinstance(mine, list | tuple):
        for place, (one, other) in enumerate(zip(theirs, mine, strict=False)):
            _check_entries(index, f"{where}[{place}]", one, other, kind)


def _kind_of(value: object) -> object:
    """What a value of a scheduler is: values of one kind can stand for each other."""
    if isinstance(value, bool):
        return bool
    if isinstance(value, Tensor) and value.numel() == 1:
        return float
    if isinstance(value, int | float):
        return float if isinstance(value, float) or value.bit_length() < 64 else None
    if isinstance(value, list | tuple):
        return list
    return dict if isinstance(value, dict) else type(value)


def _position(part: Part) -> object:
    """A rank's loader: its JSON, and the checksums of its large tensors."""
    large = [
        entry for entry in part.entries if entry.kind == tensor_kind(part.rank) and entry.name.startswith("loader#")
    ]
    return part.values["loader"], [(entry.name, entry.shape, entry.dtype, entry.checksums) for entry in large]


def _unfit(index: Index, text: str) -> CheckpointError:
    return CheckpointError(f"{index.folder} {text}; nothing was loaded")


def _some(names: Sequence[object]) -> str:
    shown = ", ".join(map(quoted, names[:NAMES_IN_A_MESSAGE]))
    more = len(names) - NAMES_IN_A_MESSAGE
    return f"{shown} and {more} more" if more > 0 else shown
