"""What an index says beside the places of ranges, checked before anything is written to a model.

The checksums find what happened by chance; an index that somebody edited has the right ones. So every value used
later is looked at here: what it is made of, its type, that a number is finite. A fault names the file and the entry.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..config.optimizers import SCALARS, SUPPORTED
from ..optim.optimizer import ShardedOptimizer
from .format import INDEX, SHOWN, VALUE, InvalidIndexError, count, state_name
from .index import Index
from .values import EncodingError, decode

HOW_TO_COMPUTE = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Settings of an optimizer that say how it computes, not what: those of the run that loads hold."""


def decoded(file: Path, value: Any, where: str, large: Callable[[str], Tensor]) -> Any:
    """The value that a part of an index stands for."""
    try:
        return decode(value, where, large)
    except EncodingError as error:
        raise InvalidIndexError(f"{file}: {error}") from error


@dataclass(frozen=True)
class At:
    """A value of an index, and where it stands there."""

    file: Path
    where: str
    value: Any

    def fault(self, wanted: str) -> InvalidIndexError:
        shown = repr(self.value)
        return InvalidIndexError(f"{self.file}: {self.where} is {shown[:60]}{'…' * (len(shown) > 60)}, not {wanted}")

    def __getitem__(self, key: str) -> At:
        if key not in self.table():
            raise InvalidIndexError(f"{self.file}: {self.where} lacks {key!r}")
        return At(self.file, f"{self.where}.{key}", self.value[key])

    def __iter__(self) -> Iterator[At]:
        if not isinstance(self.value, list):
            raise self.fault("a list")
        return iter([At(self.file, f"{self.where}[{n}]", entry) for n, entry in enumerate(self.value)])

    def optional(self, key: str) -> At | None:
        """An entry of a table; None where it is missing or None."""
        return None if self.table().get(key) is None else self[key]

    def table(self) -> dict[Any, Any]:
        if not isinstance(self.value, dict):
            raise self.fault("a table")
        return self.value

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.fault("a string")
        return self.value

    def texts(self) -> list[str]:
        return [entry.text() for entry in self]

    def count(self) -> int:
        try:
            return count(self.value)
        except ValueError:
            raise self.fault("a count") from None

    def number(self, *, finite: bool = True) -> float:
        """Also as a tensor of one element."""
        value = self.value
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise self.fault("a number")
        if finite and math.isinf(value):
            raise self.fault("a finite number")
        return value


def check_index(index: Index, shared: Any, optimizer: ShardedOptimizer | None) -> None:
    """Checks dtypes, what ranks share of an optimizer, and, where there is one to load it, its states and settings.

    Raises:
        InvalidIndexError: something is missing, or of a kind that would break training later.
    """
    file = index.folder / INDEX
    for name, kinds in index.kinds.items():
        for kind in kinds:
            if kind in (VALUE, SHOWN):
                _check_floating(index, name, kind)
    if not shared:  # the model alone was saved
        return
    at = At(file, "shared", shared)
    _check_shared(at)
    if optimizer is None or type(optimizer.unsharded).__name__ != at["optimizer"].value:
        return
    kept = SUPPORTED.get(type(optimizer.unsharded))
    scalars = At(file, "scalars", index.scalars)
    for name in scalars.table():
        if name not in index.kinds:
            raise InvalidIndexError(f"{file}: scalars has {name!r}, which is no parameter")
    for group, mine in zip(at["groups"], optimizer.param_groups, strict=False):
        _check_settings(group["settings"], mine, optimizer.defaults if kept else {"lr": None})
        for name in group["parameters"].texts():
            _check_states(index, name, scalars, None if kept is None else kept.under(group["settings"].value))


def _check_floating(index: Index, name: str, kind: str) -> None:
    if not index.dtype(name, kind).is_floating_point:
        raise InvalidIndexError(
            f"{index.folder / INDEX}: {name!r} ({kind}) is of {index.dtype(name, kind)}, not of floating-point numbers"
        )


def _check_shared(shared: At) -> None:
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
        if scale["scale"].number() <= 0:
            raise scale["scale"].fault("above 0")
        scale["good_steps"].count()
    if (host := progress.optional("host")) is not None:
        host["delaying"].count()
        host["micro_batches"].count()


def _check_settings(settings: At, mine: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Settings that this optimizer knows must be what its own are: a number, numbers, or yes and no."""
    for key in known.keys() & settings.table().keys() & mine.keys() - HOW_TO_COMPUTE:
        there, here = settings[key], mine[key]
        if isinstance(there.value, bool) and isinstance(here, int):  # as 1 for True is
            continue
        if isinstance(here, bool):
            if not isinstance(there.value, int):
                raise there.fault("True or False")
        elif isinstance(here, int | float | Tensor):
            there.number(finite=key == "lr")
        elif isinstance(here, tuple | list):
            if not isinstance(there.value, tuple | list) or len(there.value) != len(here):
                raise there.fault(f"{len(here)} numbers")
            for number, entry in enumerate(there.value):
                At(there.file, f"{there.where}[{number}]", entry).number(finite=False)


def _check_states(index: Index, name: str, scalars: At, kept: tuple[str, ...] | None) -> None:
    """Of one parameter: what one of torch's optimizers keeps is all there, or nothing is, as it has made no step."""
    moments = {state: kind for kind in index.kinds.get(name, ()) if (state := state_name(kind)) is not None}
    where = f"scalars of {name!r}"
    own = At(scalars.file, where, decoded(scalars.file, scalars.value.get(name, {}), where, no_tensor))
    own.table()
    if kept is None:  # what another optimizer keeps only itself knows
        return
    for kind in moments.values():
        _check_floating(index, name, kind)
    if not moments and not own.value:
        return
    for state in kept:
        if state in SCALARS:
            if own[state].number() < 0 and state == "step":
                raise own[state].fault("a count of steps")
        elif state not in moments:
            raise InvalidIndexError(f"{scalars.file}: {name!r} lacks {state!r}, which the optimizer has kept for it")


def no_tensor(name: str) -> Tensor:
    """For values in which no tensor is large."""
    raise EncodingError(f"there is a large tensor, {name!r}, where none can be")


def check_about(file: Path, about: Any) -> dict[str, Any]:
    """What a checkpoint says of its model, for an export.

    Raises:
        InvalidIndexError: it makes no sense.
    """
    at = At(file, "about", about)
    for key in ("config", "generation_config", "adapters"):
        if (found := at.optional(key)) is not None:
            found.table()
    At(file, "about.adapters", list(at.table().get("adapters") or ())).texts()
    at["class"].text()
    at["rounded_on_host"].texts()
    if (dtype := at.optional("parameter_dtype")) is not None:
        dtype.text()
    try:
        json.dumps(about)
    except (TypeError, ValueError) as error:
        raise InvalidIndexError(f"{file}: about is no JSON, {error}") from error
    return at.table()
