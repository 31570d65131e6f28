"""Tensors inside the structures that models take and return: found, or replaced one by one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Leaf = TypeVar("Leaf")


def tensors_in(value: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor inside tuples, lists, mappings, dataclasses and plain objects."""
    if isinstance(value, Tensor):
        yield value
        return
    if value is None or isinstance(value, str | int | float | type | nn.Module) or callable(value):
        return
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        entries: Iterable[object] = value.values()
    elif isinstance(value, tuple | list):
        entries = value
    else:
        entries = getattr(value, "__dict__", {}).values()
    for entry in list(entries):
        yield from tensors_in(entry, seen)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same structure with every tensor replaced. Objects of other kinds are passed through untouched."""
    return map_leaves(Tensor, function, value)


def map_leaves(kind: type[Leaf], function: Callable[[Leaf], Any], value: Any) -> Any:
    """The same structure with everything of one kind replaced."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, Mapping):
        changed = {key: map_leaves(kind, function, entry) for key, entry in value.items()}
        if type(value) is dict:
            return changed
        mapping: Any = copy.copy(value)
        for key, entry in changed.items():  # not update(), which Hugging Face's outputs refuse
            mapping[key] = entry
        return mapping
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(kind, function, entry) for entry in value))
    if isinstance(value, tuple | list):
        return type(value)(map_leaves(kind, function, entry) for entry in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        record = copy.copy(value)
        for entry in dataclasses.fields(value):
            object.__setattr__(record, entry.name, map_leaves(kind, function, getattr(value, entry.name)))
        return record
    return value


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """The same structure with floating-point tensors in ``dtype``."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
