"""Functions of torch that save other tensors on a GPU than on the meta device, or do not run there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Counts(Protocol):
    """What the functions count."""

    flops: float
    attention_flops: float
    """FLOPs of attention in forward passes."""
    logits: float
    """Elements of the input of the loss."""


class GpuFunctions(TorchFunctionMode):
    """Replaces attention and the products of experts by functions that save what a GPU's kernels save.

    Counts their FLOPs, and the logits of the loss.
    """

    def __init__(self, watch: Counts) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is F.cross_entropy:
            self._watch.logits += (args[0] if args else given["input"]).numel()
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **given)
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            return self._experts(*args, **given)
        if func is F.multi_head_attention_forward:  # a mode does not see what a function of torch calls inside
            return _calling(func, scaled_dot_product_attention=self._attention)(*args, **given)
        return func(*args, **given)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        if query.shape[-3] % key.shape[-3]:
            raise ValueError(f"{query.shape[-3]} heads cannot share {key.shape[-3]} heads of keys and values")
        self._watch.attention_flops += 4.0 * query.numel() * key.shape[-2]
        return _Attention.apply(query, key, value)  # type: ignore[no-any-return, no-untyped-call]

    def _experts(self, rows: Tensor, matrices: Tensor, *_: Any, **__: Any) -> Tensor:
        self._watch.flops += 2.0 * rows.numel() * matrices.shape[-1]
        return _Experts.apply(rows, matrices, self._watch)  # type: ignore[no-any-return, no-untyped-call]


class _Experts(torch.autograd.Function):
    """Products of rows with the matrix of their expert. Torch's own takes only bf16 on the meta device."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, watch: Counts) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        ctx.watch = watch
        return rows.new_empty(*rows.shape[:-1], matrices.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, matrices = ctx.saved_tensors
        found = [
            torch.empty_like(tensor) if needed else None
            for tensor, needed in zip((rows, matrices), ctx.needs_input_grad, strict=False)
        ]
        ctx.watch.flops += 2.0 * rows.numel() * matrices.shape[-1] * sum(one is not None for one in found)
        return found[0], found[1], None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        *batch, heads, rows, _ = query.shape
        result = query.new_empty(*batch, rows, heads, value.shape[-1]).transpose(-2, -3)  # the kernels' layout
        sums = query.new_empty(*batch, heads, rows, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, sums)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _calling(function: Callable[..., Any], **others: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function of torch that calls other functions under these names. Torch itself is not changed."""
    if not isinstance(function, FunctionType):
        return function
    known = {**function.__globals__, **others}
    copied = FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
