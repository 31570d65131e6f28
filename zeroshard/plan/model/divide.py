"""What one rank of tensor parallelism has of a module: the module itself, with smaller matrices.

As torch divides them: a matrix is cut into equal parts along one axis, and the first rank has the largest part.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping

from torch import nn

from ..setup import ModelError

COLUMNS, ROWS = "colwise", "rowwise"
WHOLE = {"colwise_gather_output", "replicated_with_grad_allreduce", "replicate", "rep"}
"""Styles of ``transformers`` that leave a rank with the whole parameter, or with the whole of its result."""


def divide(model: nn.Module, styles: Mapping[str, str], degree: int) -> frozenset[int]:
    """Makes the matrices of a module smaller. Returns the ids of the parameters that were divided.

    ``styles``: by the name of a module, with ``*`` for any number: "colwise" divides what it returns, "rowwise" what it
    gets. An embedding is divided by its rows.
    """
    found: set[int] = set()
    for name, module in model.named_modules():
        style = next((style for pattern, style in styles.items() if _matches(name, pattern)), None)
        if style is None or style in WHOLE:
            continue
        if style not in (COLUMNS, ROWS) or not isinstance(module, nn.Linear | nn.Embedding):
            raise ModelError(f"--model-parallel {degree}: how {name} is divided ({style}) is not known to the plan")
        found.update(_shrink(module, style, degree))
    return frozenset(found)


def check_heads(degree: int, *heads: int | None) -> None:
    """Refuses a number of ranks that cannot share the heads of attention evenly."""
    for count in heads:
        if count is not None and count % degree:
            raise ModelError(f"--model-parallel {degree} does not divide the {count} heads")


def _shrink(module: nn.Linear | nn.Embedding, style: str, degree: int) -> Iterator[int]:
    axis = 1 if style == ROWS and isinstance(module, nn.Linear) else 0
    tensors = {"weight": axis}
    if axis == 0 and getattr(module, "bias", None) is not None:
        tensors["bias"] = 0
    for name, along in tensors.items():
        whole = getattr(module, name)
        part = whole.detach().narrow(along, 0, math.ceil(whole.shape[along] / degree)).contiguous()
        setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        yield id(getattr(module, name))


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
