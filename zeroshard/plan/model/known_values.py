"""Values of small tensors during a trace on the meta device: those that follow from constants and from the inputs.

A model may read a mask before it chooses how to compute, for example with ``mask.all()`` or ``positions.max()``. Such
tensors are small. They are made of ``ones``, ``arange`` and the inputs of forward, not of parameters. Next to the
trace, they are computed on the CPU operation by operation. So reading one number gives the same answer as in a run.
Tensors that follow from parameters, random numbers or ``empty`` have no value here, and reading them fails. Copies to
another device fail too, and so does ``tolist()``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ...system import compat
from ...system.structures import map_leaves, map_tensors, tensors_in

MOST_ELEMENTS = 1 << 24
"""Tensors with more elements are not computed."""
DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations that need values for their result or for its shape."""
CPU, META = torch.device("cpu"), torch.device("meta")


class KnownValues(compat.OperationMode):
    """A mode in which small tensors on the meta device have values, if they follow from tensors with values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, Tensor] = {}
        """By storage on the meta device: its elements on the CPU. All views of the storage share them."""

    def run(self, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tags = set(getattr(operation, "tags", ()))
        tensors = list(tensors_in((args, kwargs)))
        if not any(tensor.device == META for tensor in tensors) and kwargs.get("device") != META:
            return operation(*args, **kwargs)
        if tags & DATA_DEPENDENT and all(self._knows(tensor) for tensor in tensors):
            found = self._compute(operation, args, kwargs)
            return map_tensors(self._on_meta, found)
        result = operation(*args, **kwargs)
        known = self._follows(operation, tags) and all(self._knows(tensor) for tensor in tensors)
        if known and all(leaf.numel() <= MOST_ELEMENTS for leaf in tensors_in(result)):
            self._learn(operation, args, kwargs, result)
        elif compat.writes(operation):
            self.forget(tensors)
        return result

    def _follows(self, operation: Callable[..., Any], tags: set[torch.Tag]) -> bool:
        return torch.Tag.nondeterministic_seeded not in tags and "empty" not in compat.operation_name(operation)

    def _knows(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided or tensor.numel() > MOST_ELEMENTS:
            return False
        if tensor.device != META:
            return True
        value = self._storages.get(compat.storage_key(tensor))
        return value is not None and value.dtype is tensor.dtype

    def _value(self, leaf: Any) -> Any:
        """The CPU value of an argument of an operation."""
        if isinstance(leaf, torch.device):
            return CPU
        if leaf.device != META:
            return leaf.detach().to(CPU)
        value = self._storages[compat.storage_key(leaf)]
        return value.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())

    def _compute(self, operation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        values, named = map_leaves((Tensor, torch.device), self._value, (args, kwargs))
        with torch.no_grad():
            return operation(*values, **named)

    def _learn(self, operation: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        try:
            found = self._compute(operation, args, kwargs)
        except (RuntimeError, IndexError, NotImplementedError):  # the CPU cannot compute this, so there is no value
            self.forget(tensors_in((args, kwargs)))
            return
        for empty, value in zip(tensors_in(result), tensors_in(found), strict=True):
            self._remember(empty, value)

    def _on_meta(self, value: Tensor) -> Tensor:
        empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
        self._remember(empty, value)
        return empty

    def _remember(self, empty: Tensor, value: Tensor) -> None:
        key, storage = compat.storage_key(empty), empty.untyped_storage()
        if empty.device != META or key in self._storages:  # after a view or a write in place the value is there already
            return
        elements = torch.empty(storage.nbytes() // empty.itemsize, dtype=empty.dtype, device=CPU)
        elements.as_strided(empty.shape, empty.stride(), empty.storage_offset()).copy_(value)
        self._storages[key] = elements
        weakref.finalize(storage, self._storages.pop, key, None)

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Drops the values of these tensors."""
        for tensor in tensors:
            if tensor.device == META:
                self._storages.pop(compat.storage_key(tensor), None)
