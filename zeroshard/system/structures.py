"""Tensors inside the structures that models and operations take and return: found, or replaced one by one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

WITHOUT_TENSORS = (str, int, float, type, nn.Module, torch.SymInt, torch.SymFloat, type(None))


def tensors_in(value: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor inside tuples, lists, mappings, dataclasses and plain objects."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, WITHOUT_TENSORS) or callable(value):
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
    """The same structure with every tensor replaced. Objects of other kinds stay as they are."""
    return map_leaves(Tensor, function, value)


def map_leaves(kinds: type | tuple[type, ...], function: Callable[[Any], Any], value: Any) -> Any:
    """The same structure with every object of these kinds replaced."""
    if isinstance(value, kinds):
        return function(value)
    if isinstance(value, Mapping):
        changed = {key: map_leaves(kinds, function, entry) for key, entry in value.items()}
        if type(value) is dict:
            return changed
        mapping: Any = copy.copy(value)
        for key, entry in changed.items():  # not update(), which Hugging Face's outputs refuse
            mapping[key] = entry
        return mapping
    if isinstance(value, tuple | list):
        entries = [map_leaves(kinds, function, entry) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        record = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(record, field.name, map_leaves(kinds, function, getattr(value, field.name)))
        return record
    return value


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """The same structure with floating-point tensors in ``dtype``."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
