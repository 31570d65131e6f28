"""A question about gradients: a number that is asked of each whole averaged gradient, such as its norm.

Every rank has a part of each gradient. It reduces its part to one number in fp64. The numbers of all ranks are then
joined in rank order, so that all ranks and all stages get the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Elementwise = Callable[[Tensor], Tensor]
"""Maps each element of a gradient by itself."""


@dataclass(frozen=True)
class Statistic:
    """How a gradient becomes one number: a norm, a sum, a largest element."""

    text: str
    part: Callable[[Tensor], Tensor]
    """The number of one part, from its elements."""
    join: Callable[[Tensor], Tensor]
    """The numbers of several parts become one, along the first dimension."""
    neutral: float
    """The number of a part without elements."""
    order: float | None = None
    """The order of a norm; None for other reductions. A factor of the gradient is then a factor of the answer."""


@dataclass(frozen=True)
class Question:
    """What is asked of a gradient. Two questions are the same if they have the same text."""

    text: str
    statistic: Statistic = field(compare=False)
    mapping: Elementwise | None = field(compare=False, default=None)
    """Is applied to the elements before they are reduced."""

    def of_part(self, values: Tensor) -> Tensor:
        """The number of a part of one gradient, in fp64."""
        if not values.numel():
            return torch.full((), self.statistic.neutral, dtype=torch.float64, device=values.device)
        mapped = values if self.mapping is None else self.mapping(values)
        return self.statistic.part(mapped).to(torch.float64)

    @property
    def is_norm(self) -> bool:
        """Whether this is a norm of the gradients themselves, which factors may be applied to afterwards."""
        return self.mapping is None and self.statistic.order is not None and self.statistic.order != 0

    @property
    def is_two_norm(self) -> bool:
        return self.mapping is None and self.statistic.order == 2


def norm(order: float) -> Statistic:
    """The vector norm of some order."""
    text = f"norm of order {order:g}"

    def part(values: Tensor) -> Tensor:
        result: Tensor = torch.linalg.vector_norm(values, order, dtype=torch.float64)
        return result

    if order == math.inf:
        return Statistic(text, part, _largest, 0.0, order)
    if order == -math.inf:
        return Statistic(text, part, _smallest, math.inf, order)
    if order == 0:
        return Statistic(text, part, _total, 0.0, order)

    def join(norms: Tensor) -> Tensor:
        total = norms.square().sum(0) if order == 2 else norms.pow(order).sum(0)
        return total.sqrt() if order == 2 else total.pow(1.0 / order)

    return Statistic(text, part, join, 0.0 if order > 0 else math.inf, order)


def _total(numbers: Tensor) -> Tensor:
    return numbers.sum(0)


def _largest(numbers: Tensor) -> Tensor:
    return numbers.amax(0)


def _smallest(numbers: Tensor) -> Tensor:
    return numbers.amin(0)


TOTAL = Statistic("sum", lambda values: values.sum(dtype=torch.float64), _total, 0.0)
LARGEST = Statistic("max", torch.amax, _largest, -math.inf)
SMALLEST = Statistic("min", torch.amin, _smallest, math.inf)
ALL = Statistic("all", torch.all, _smallest, 1.0)
ANY = Statistic("any", torch.any, _largest, 0.0)
NONZERO = Statistic("count_nonzero", torch.count_nonzero, _total, 0.0)

FINITE = Question("all of isfinite(the gradient)", ALL, torch.isfinite)
"""Whether all elements are finite."""


@dataclass(frozen=True)
class Reading:
    """A function of torch that reduces a whole tensor, with its arguments."""

    statistic: Statistic
    dtype: torch.dtype
    """Of the answer."""
    is_mean: bool = False


def parse(name: str, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading | None:
    """What a function of torch asks of a tensor of this dtype. None: only a whole tensor can answer that."""
    if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        return None
    try:
        return _parse(name, dtype, args, tuple(kwargs.items()))
    except TypeError:  # an argument that cannot be hashed, such as a list of dimensions
        return None


@lru_cache(maxsize=256)
def _parse(name: str, dtype: torch.dtype, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Reading | None:
    signature = SIGNATURES.get(name)
    if signature is None or len(args) > len(signature):
        return None
    given = {**dict(zip(signature, args, strict=False)), **dict(kwargs)}
    if given.pop("out", None) is not None or given.pop("keepdim", False) or given.pop("axis", None) is not None:
        return None
    if given.pop("dim", None) not in (None, ()):
        return None
    asked_dtype = given.pop("dtype", None)
    order = given.pop("order", given.pop("ord", given.pop("p", None)))
    if given:
        return None
    if "norm" not in name:
        statistic = REDUCTIONS[name]
    elif name == "linalg_norm" and order is not None:
        return None  # the norm of a matrix
    elif isinstance(order, str) and order not in ("fro", "inf", "-inf"):
        return None
    else:
        statistic = norm(2.0 if order is None or order == "fro" else float(order))
    return Reading(statistic, asked_dtype or _answer_dtype(name, dtype), is_mean=name == "mean")


def _answer_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that torch answers with; at least fp32, because an answer stands for many elements."""
    if name in ("all", "any"):
        return torch.bool
    if name in ("count_nonzero",) or (name == "sum" and not dtype.is_floating_point):
        return torch.int64
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


REDUCTIONS = {
    "sum": TOTAL,
    "mean": TOTAL,
    "max": LARGEST,
    "amax": LARGEST,
    "min": SMALLEST,
    "amin": SMALLEST,
    "all": ALL,
    "any": ANY,
    "count_nonzero": NONZERO,
}
SIGNATURES = {
    **dict.fromkeys(REDUCTIONS, ("dim", "keepdim")),
    "norm": ("p", "dim", "keepdim", "out", "dtype"),
    "linalg_vector_norm": ("ord", "dim", "keepdim"),
    "linalg_norm": ("ord", "dim", "keepdim"),
}
"""Functions of torch that reduce a tensor, and the names of their arguments after the tensor, in order."""
