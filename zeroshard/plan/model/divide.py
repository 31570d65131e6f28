"""What one rank of tensor parallelism has of a module: the module itself, with smaller matrices.

As torch divides them: a matrix is cut into equal parts along one axis, and the first rank has the largest part.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..setup import ModelError

COLUMNS = {"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise", "embedding_colwise"}
"""Styles that divide the results of a matrix. The names are those of torch and of ``transformers``."""
ROWS = {"rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "embedding_rowwise"}
"""Styles that divide the inputs of a matrix, and the rows of an embedding."""
WHOLE = {
    *("replicated_with_grad_allreduce", "replicate", "rep", "all_reduce"),
    *("moe_tp_experts", "moe_identity_expert", "mla_kv_a_proj"),
}
"""Styles that leave a rank with the whole parameter."""
GATHERED = {"colwise_gather_output", "colwise_rep", "embedding_colwise"}
"""Styles after which every rank has the whole result."""
SPLIT = {"rowwise_rep", "rowwise_split_input"}
"""Styles before which every rank has the whole input."""


def divide(model: nn.Module, styles: Mapping[str, str], degree: int) -> frozenset[int]:
    """Makes the matrices of a module smaller. Returns the ids of the parameters that were divided.

    ``styles``: by the name of a module or of a parameter, with ``*`` for any part of a name.
    """
    parts: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    """By the id of a whole parameter: the parameter, and the part of it. Tied parameters stay tied."""
    for name, module in model.named_modules():
        style = _style(name, styles)
        matrices = 0
        for key, whole in list(module.named_parameters(recurse=False)):
            kind = _style(f"{name}.{key}", styles) or style
            axis = None if kind is None else _axis(module, whole, kind, name, degree)
            matrices += whole.dim() > 1
            if axis is not None:
                if id(whole) not in parts:
                    parts[id(whole)] = (whole, _part(whole, axis, degree))
                setattr(module, key, parts[id(whole)][1])
                if isinstance(module, nn.Embedding):
                    module.padding_idx = None  # may be beyond the part
        if style in COLUMNS | ROWS and not matrices:
            raise _unknown(name, str(style), degree)
        if style in GATHERED:
            module.register_forward_hook(_gather(degree))
        elif style in SPLIT:
            module.register_forward_pre_hook(_split)
    return frozenset(id(part) for _, part in parts.values())


def check_heads(degree: int, heads: int | None, key_heads: int | None = None) -> None:
    """Refuses a number of ranks that cannot share the heads of attention evenly."""
    for count, kind in ((heads, "heads"), (key_heads, "heads of keys and values")):
        if count is not None and count % degree:
            raise ModelError(f"--model-parallel {degree} does not divide the {count} {kind}")


def _style(name: str, styles: Mapping[str, str]) -> str | None:
    parts = name.split(".")

    def matches(pattern: str) -> bool:
        patterns = pattern.split(".")
        return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))

    return next((style for pattern, style in styles.items() if matches(pattern)), None)


def _axis(module: nn.Module, whole: Tensor, style: str, name: str, degree: int) -> int | None:
    """The axis along which a parameter is cut; None if every rank has all of it."""
    if style in WHOLE:
        return None
    if style not in COLUMNS | ROWS:
        raise _unknown(name, style, degree)
    if isinstance(module, nn.Embedding):
        return 0 if style in ROWS else 1
    if style in COLUMNS:
        return max(0, whole.dim() - 2)
    return whole.dim() - 1 if whole.dim() > 1 else None  # every rank has the whole bias of a sum


def _unknown(name: str, style: str, degree: int) -> ModelError:
    return ModelError(f"--model-parallel {degree}: how {name} is divided ({style}) is not known to the plan")


def _part(whole: nn.Parameter, axis: int, degree: int) -> nn.Parameter:
    part = whole.detach().narrow(axis, 0, math.ceil(whole.shape[axis] / degree)).contiguous()
    return nn.Parameter(part, requires_grad=whole.requires_grad)


def _gather(degree: int) -> Callable[..., Tensor]:
    """A hook that returns a result of the whole size, as an all-gather does."""

    def hook(module: Any, args: Any, output: Tensor) -> Tensor:
        whole = getattr(module, "num_embeddings", None) and module.embedding_dim
        size = whole or getattr(module, "out_features", degree * output.shape[-1])
        return torch.cat([output] * degree, dim=-1)[..., :size]

    return hook


def _split(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A hook that takes a rank's part of the input."""
    return (args[0].narrow(-1, 0, module.weight.shape[-1]), *args[1:])
