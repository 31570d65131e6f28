"""Refuses a checkpoint that makes no sense, or does not fit the model, before anything is written to the model.

Checksums find damage by chance. An index that somebody edited has the right checksums. So every value that is used
later is checked here: its parts, its type, and that a number is finite. An error names the file and the entry.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ..comm.fabric import Fabric
from ..config.optimizers import SCALARS, SUPPORTED
from ..optim.optimizer import ShardedOptimizer
from ..runtime import Runtime
from .contents import buffers_of, name_of
from .format import BUFFER, SHOWN, VALUE, CheckpointError, InvalidIndexError, Part, state_name, tensor_kind
from .random_state import Predecessor
from .read import Index
from .values import EncodingError, decode

HOW_TO_COMPUTE = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Settings that say how an optimizer computes, not what. The run that loads uses its own."""
NAMES_IN_A_MESSAGE = 3

T = TypeVar("T")


def decoded(file: Path, value: Any, where: str, large: Callable[[str], Tensor]) -> Any:
    """The value that a part of an index stands for. Raises InvalidIndexError."""
    try:
        return decode(value, where, large)
    except EncodingError as error:
        raise InvalidIndexError(f"{file}: {error}") from error


def no_tensor(name: str) -> Tensor:
    """Raises. Given to ``decoded`` for values that have no large tensor."""
    raise EncodingError(f"there is a large tensor, {name!r}, where none can be")


@dataclass(frozen=True)
class Node:
    """A value of an index, and where it stands there. A method raises if the value is not what the method asks for."""

    file: Path
    where: str
    value: Any

    def fault(self, wanted: str) -> InvalidIndexError:
        shown = repr(self.value)
        return InvalidIndexError(f"{self.file}: {self.where} is {shown[:60]}{'…' * (len(shown) > 60)}, not {wanted}")

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

    def number(self, *, finite: bool = True) -> Any:
        """A number, or a tensor of one element."""
        value = self.value
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            value = value.item()
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        self.must(is_number and value == value, "a number")
        self.must(not finite or abs(value) <= sys.float_info.max, "a finite number")
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
            raise InvalidIndexError(f"{index.file}: scalars has {name!r}, which is no parameter")
    for group, mine in zip(node["groups"], optimizer.param_groups, strict=False):
        _check_settings(group["settings"], mine, optimizer.defaults if known else {"lr": None})
        for name in group["parameters"].texts():
            _check_states(index, name, scalars, None if known is None else known.under(group["settings"].value))


def _check_floating(index: Index, name: str, kind: str) -> None:
    if not index.dtype(name, kind).is_floating_point:
        raise InvalidIndexError(
            f"{index.file}: {name!r} ({kind}) is of {index.dtype(name, kind)}, not of floating-point numbers"
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
    if (scale := progress.optional("loss_scale")) is not None:
        scale["scale"].must(scale["scale"].number() > 0, "above 0")
        scale["good_steps"].count()
    if (host := progress.optional("host")) is not None:
        host["delaying"].count()
        host["micro_batches"].count()


def _check_settings(settings: Node, mine: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Settings that this optimizer knows must be of the types of its own: a number, numbers, or True and False."""
    for key in known.keys() & settings.table().keys() & mine.keys() - HOW_TO_COMPUTE:
        there, here = settings[key], mine[key]
        if isinstance(there.value, bool) and isinstance(here, int):  # torch takes True for 1
            continue
        if isinstance(here, bool):
            there.must(isinstance(there.value, int), "True or False")
        elif isinstance(here, int | float | Tensor):
            there.number(finite=key == "lr")
        elif isinstance(here, tuple | list):
            there.must(isinstance(there.value, tuple | list) and len(there.value) == len(here), f"{len(here)} numbers")
            for entry in there:
                entry.number(finite=False)


def _check_states(index: Index, name: str, scalars: Node, expected: tuple[str, ...] | None) -> None:
    """A parameter must have every state that is expected, or no state at all if it has made no step."""
    moments = {state: kind for kind in index.kinds.get(name, ()) if (state := state_name(kind)) is not None}
    where = f"scalars of {name!r}"
    own = Node(scalars.file, where, decoded(scalars.file, scalars.value.get(name, {}), where, no_tensor))
    own.table()
    if expected is None:  # not torch's own optimizer: its states are not known here
        return
    for kind in moments.values():
        _check_floating(index, name, kind)
    if not moments and not own.value:
        return
    for state in expected:
        if state in SCALARS:
            number = own[state].number()
            own[state].must(number >= 0 or state != "step", "a count of steps")
        elif state not in moments:
            raise InvalidIndexError(f"{scalars.file}: {name!r} lacks {state!r}, which the optimizer has had for it")


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
        raise InvalidIndexError(f"{index.file}: about is no JSON, {error}") from error
    return node.table()


# -- the checkpoint and this run --------------------------------------------------------------------------------------


def check_fits(index: Index, runtime: Runtime, optimizer: ShardedOptimizer | None, shared: dict[str, Any]) -> None:
    """Model and optimizer must have the parameters, buffers, groups and states of the checkpoint.

    Raises:
        CheckpointError: they differ.
    """
    wanted = {name_of(name): tuple(p.shape) for name, p in runtime.model.named_parameters()}
    buffers = {name: tuple(buffer.shape) for name, buffer in buffers_of(runtime)}
    stored = {name: index.shape(name) for name in index.kinds}
    stored_buffers = {name: index.shape(name, kind) for name, kind in index.places if kind == BUFFER}
    for what, ours, theirs in (("parameter", wanted, stored), ("buffer", buffers, stored_buffers)):
        if missing := [name for name in ours if name not in theirs]:
            raise _unfit(index, f"lacks {what} {_some(missing)} of the model")
        if unknown := [name for name in theirs if name not in ours]:
            raise _unfit(index, f"has {what} {_some(unknown)}, which the model has not")
        for name, shape in ours.items():
            if theirs[name] != shape:
                raise _unfit(index, f"has {what} {name!r} of shape {list(theirs[name])}, the model of {list(shape)}")
    if optimizer is None:
        return
    if not shared:
        raise _unfit(index, "has no optimizer; load it with optimizer=None")
    kind = type(optimizer.unsharded).__name__
    if shared["optimizer"] != kind:
        raise _unfit(index, f"was saved with {shared['optimizer']}, and this run has {kind}, whose states differ")
    names = {id(p): name_of(name) for name, p in runtime.model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    saved: list[list[str]] = [group["parameters"] for group in shared["groups"]]
    if groups != saved:
        raise _unfit(
            index,
            f"has the optimizer's groups divided otherwise ({[len(group) for group in saved]} parameters, here "
            f"{[len(group) for group in groups]}); build it with the same groups",
        )
    for name, kind in index.places:
        state = state_name(kind)
        if state is not None and not optimizer.piece_states.takes(state):
            raise _unfit(
                index, f"has {state!r} of {name!r}, which the host's optimizer has not; load it without offload"
            )


def check_given(index: Index, scheduler: Any, loader: Any, fabric: Fabric, predecessor: Predecessor) -> None:
    """Scheduler and loader must be able to take a state, and the checkpoint must have one for them.

    Raises:
        CheckpointError: a state is missing, or belongs to another number of ranks.
    """
    for name, thing, there in (
        ("scheduler", scheduler, "scheduler" in index.values),
        ("loader", loader, all("loader" in part.values for part in index.parts)),
    ):
        if thing is not None and not there:
            raise _unfit(index, f"has no {name}, so leave {name}= out")
        if thing is not None and not callable(getattr(thing, "load_state_dict", None)):
            raise CheckpointError(f"{name}: a {type(thing).__name__} has no load_state_dict(); nothing was loaded")
    if loader is not None and predecessor.rearranged:
        first, *others = map(_position, index.parts)
        if any(other != first for other in others):
            raise _unfit(
                index,
                f"holds the data's position of {len(index.parts)} ranks, each its own, and this run has "
                f"{fabric.world}, or divides the model otherwise; leave loader= out, and set the position yourself",
            )


def _position(part: Part) -> object:
    """A rank's loader: its JSON, and the checksums of its large tensors."""
    large = [
        entry for entry in part.entries if entry.kind == tensor_kind(part.rank) and entry.name.startswith("loader#")
    ]
    return part.values["loader"], [(entry.name, entry.shape, entry.dtype, entry.checksums) for entry in large]


def _unfit(index: Index, text: str) -> CheckpointError:
    return CheckpointError(f"{index.folder} {text}; nothing was loaded")


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:NAMES_IN_A_MESSAGE]))
    more = len(names) - NAMES_IN_A_MESSAGE
    return f"{shown} and {more} more" if more > 0 else shown
