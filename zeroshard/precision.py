"""Dtypes at the border of the model, loss scaling, and the global gradient norm."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from . import compat
from .comm import DisagreementError, Fabric
from .config import LossScale
from .flat import Flat
from .reducer import gradient_of

Leaf = TypeVar("Leaf")

REPLICAS_APART = 1e-2
"""Gradients that should be the same may differ by rounding, where kernels add in no fixed order, and by no more."""


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


class LossScaler:
    """The dynamic loss scale: lowered by a step that overflows, raised after many that do not."""

    def __init__(self, config: LossScale) -> None:
        self._config = config
        self.scale = config.initial
        self._good_steps = 0

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps of it."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load(self, state: dict[str, float]) -> None:
        """Goes on from what ``state`` gave."""
        self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])

    @property
    def can_be_lowered(self) -> bool:
        """Whether an overflow may be due to the scale."""
        return self.scale > self._config.minimum

    def update(self, overflowed: bool) -> None:
        if overflowed:
            self.scale = max(self.scale / self._config.factor, self._config.minimum)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._config.growth_interval:
            self._good_steps = 0
            # A scale beyond fp32 would itself be infinite.
            self.scale = min(self.scale * self._config.factor, math.ldexp(1.0, 126))


def global_norm(flats: list[Flat], fabric: Fabric) -> Tensor:
    """The 2-norm of the whole model's averaged gradients, an fp64 scalar on the device.

    Each rank sums the squares of its own shards, the partial sums are added in rank order: all stages and all ranks
    get the same bits. What every model-parallel rank has whole is counted by the first of them.
    """
    if fabric.model.rank > 0:
        flats = [flat for flat in flats if flat.divided]
    parts = {flat: part for flat in flats if (part := gradient_of(flat).part(flat.shard_range)) is not None}
    found = dict(zip(parts, compat.norms([part for part, _ in parts.values()], torch.float64), strict=True))
    factors = {flat: factor for flat, (_, factor) in parts.items()}
    for flat in flats:
        on_host = gradient_of(flat).host_norm() if flat not in parts else None
        if on_host is not None:
            found[flat], factors[flat] = on_host
    ordered = [flat for flat in flats if flat in found]
    if not ordered:
        mine = torch.zeros((), dtype=torch.float64, device=fabric.device)
    else:
        norms = torch.stack([found[flat] for flat in ordered])
        if any(factor is not None for factor in factors.values()):
            one = torch.ones((), device=fabric.device)
            norms = norms * torch.stack([one if (f := factors[flat]) is None else f for flat in ordered])
        mine = norms.square().sum()
    return fabric.sum_in_order(mine).sqrt()


def local_norms(flats: list[Flat]) -> list[Tensor]:
    """The norm of each flat's averaged gradient, of the part on this rank; of those that have one."""
    found = []
    for flat in flats:
        part = gradient_of(flat).part(flat.shard_range)
        if part is not None:
            found += compat.norms([part[0]], torch.float64)
        elif (on_host := gradient_of(flat).host_norm()) is not None:
            found.append(on_host[0])
    return found


def check_replicas_agree(flats: list[Flat], fabric: Fabric) -> None:
    """What every tensor-parallel rank has whole must have one gradient on all of them, or its values drift apart.

    Asked in the first step, and in the first after a load, for it waits for the device. Gradients that are on the
    host by then are not seen.
    """
    parts = {flat: gradient_of(flat).part(flat.shard_range) for flat in flats if not flat.divided}
    held = {flat: part[0] for flat, part in parts.items() if part is not None}
    if fabric.model.world == 1 or fabric.backend == "fake" or not held:
        return
    norms = fabric.gather_along_model(torch.stack(compat.norms(list(held.values()), torch.float64)))
    apart = norms.amax(0) - norms.amin(0) > REPLICAS_APART * norms.amax(0)
    for flat, differs in zip(held, apart.tolist(), strict=True):
        if differs:
            raise DisagreementError(
                f"the gradients of {flat.layout.slots[0].name!r} and its neighbours, which every tensor-parallel rank "
                "has whole, differ among these ranks. Either their inputs are divided, as with sequence parallelism, "
                "and nobody adds the gradients up: name these modules in the plan (SequenceParallel), so that they "
                "become DTensors. Or the ranks see different data or draw different random numbers: give them the same"
            )


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are multiplied by, as ``torch.nn.utils.clip_grads_with_norm_`` has it. Stays on the device."""
    return torch.clamp(max_norm / (norm.to(torch.float32) + 1e-6), max=1.0)
