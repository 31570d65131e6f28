"""Measures activations and FLOPs of any module: one forward and backward on the meta device, counting storages.

Nothing is computed and no memory is used, except for small constants that a model may read (``known_values``).
Attention counts as in the fused kernels of a GPU: they save queries, keys, values, the result and one number a row, but
not the scores. Attention that returns its weights is not fused.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..config.checks import DTYPES
from ..config.layout import UnitSpec, find_units
from ..config.options import Activations
from ..system import compat
from .activations import ActivationBytes
from .known_values import KnownValues
from .module_trace import ModuleTrace
from .recomputation import Recomputation
from .units import buffer_bytes, module_units

TARGETS = ("labels", "targets")
"""Names of forward's argument for the targets. If they get targets, most models return a loss."""


def trace(
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | None,
    precision: str,
    batch: int,
    sequence: int,
    max_unit_bytes: int,
    name: str = "",
    chosen: Sequence[str | type[nn.Module]] | None = None,
    values: KnownValues | None = None,
    activations: Activations | None = None,
) -> ModuleTrace:
    """Traces a model that is on the meta device. Without inputs the model is called with token ids that are all zero.

    If the model returns no loss, its outputs are summed to one. ``values``: the known values of inputs on the meta
    device. ``activations``: the option of ``shard()``.
    """
    dtype = DTYPES[precision]
    buffers = buffer_bytes(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    units = find_units(model, chosen=chosen, max_unit_bytes=max_unit_bytes, itemsize=dtype.itemsize)
    watch = _Tracer(model, units)
    recomputation = Recomputation(activations or Activations())
    blocks = [unit.module for unit in units[1:]] if activations is not None else []
    try:
        known = values or KnownValues()
        known.forget(model.parameters())
        with known:
            args, kwargs = _arguments(model, inputs, batch, sequence, dtype)
        with known, watch, _KnownFunctions(watch), recomputation.recompute(blocks):
            output = model(*args, **kwargs)
            watch.end_forward()
            loss = _loss(output)
            del output
            compat.run_backward(loss)
    finally:
        watch.remove_hooks()
    return ModuleTrace(
        name or type(model).__name__,
        module_units(model, dtype.itemsize, max_unit_bytes, chosen),
        buffers,
        replace(watch.activations(), host=recomputation.on_host),
        tuple(watch.forward_flops),
        tuple(written / dtype.itemsize for written in watch.forward_written),
        watch.backward_flops,
        watch.logits,
        recomputes=watch.recomputes or bool(blocks),
        checkpoints=recomputation.bytes,
        tokens_known=inputs is None or tokens_of(inputs) != (0, 0),
    )


def _arguments(
    model: nn.Module, inputs: Sequence[Any] | Mapping[str, Any] | None, batch: int, sequence: int, dtype: torch.dtype
) -> tuple[list[Any], dict[str, Any]]:
    if inputs is None:
        tokens = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
        known = inspect.signature(model.forward).parameters
        return [tokens], {target: tokens for target in TARGETS if target in known}

    def ready(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to("meta", dtype if value.is_floating_point() else value.dtype)

    if isinstance(inputs, Mapping):
        return [], {key: ready(value) for key, value in inputs.items()}
    values = [inputs] if isinstance(inputs, Tensor) else inputs
    return [ready(value) for value in values], {}


def tokens_of(inputs: Any) -> tuple[int, int]:
    """Batch and sequence of the first tensor of token ids; zeros if there is none."""
    for value in _tensors(inputs):
        if value.dim() == 2 and not value.is_floating_point():
            return value.shape[0], value.shape[1]
    return 0, 0


def samples_of(inputs: Any) -> int:
    """The number of samples in a micro-batch: the first dimension of the first tensor."""
    return next((value.shape[0] for value in _tensors(inputs) if value.dim()), 1)


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [tensor for tensor in _tensors(output) if tensor.grad_fn is not None]
    if not tensors:
        raise ValueError("no output of it depends on its parameters")
    if len(tensors) == 1 and tensors[0].dim() == 0:
        return tensors[0]
    return torch.stack([tensor.float().mean() for tensor in tensors]).sum()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)


class _Tracer(compat.OperationWatch):
    """Counts the bytes of storages that are alive, without parameters and buffers, and finds the maxima by unit."""

    def __init__(self, model: nn.Module, units: Sequence[UnitSpec]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, int] = {}
        self._own = {compat.storage_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._alive = 0
        self._count = len(units)
        self._forward, self._backward, self._after = ([0] * len(units) for _ in range(3))
        self._loss = self._saved = self._early = 0
        self.recomputes = False
        """True if the module itself recomputes blocks in backward."""
        self._turned = False
        """True after the model has returned. From then on the loss or backward is computed."""
        self._note: Callable[[int], None] = _into(self._forward, 0)
        self.attention_flops = self.logits = 0.0
        """FLOPs of attention in forward passes, which torch's counter does not see; and the elements of logits."""
        self.forward_flops = [0.0] * len(units)
        self.forward_written = [0] * len(units)
        """Bytes of activations, by unit."""
        self._unit = 0
        self._counted = self._forward_attention = 0.0
        self._hooks: list[RemovableHandle] = []
        for number, unit in enumerate(units):
            if number:
                self._hooks.append(unit.module.register_forward_pre_hook(self._enter(number), prepend=True))
                self._hooks.append(unit.module.register_forward_hook(self._leave(number)))
            for _, parameter in unit.parameters:
                if parameter.requires_grad:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._take(number)))

    def remove_hooks(self) -> None:
        """Removes all hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def see(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            key, storage = compat.storage_key(tensor), tensor.untyped_storage()
            if key not in self._known and key not in self._own:
                self._known[key] = storage.nbytes()
                self._alive += storage.nbytes()
                if not self._turned:
                    self.forward_written[self._unit] += storage.nbytes()
                self._note(self._alive)
                weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._alive -= self._known.pop(key, 0)

    # -- where the pass is ----------------------------------------------------------------------------------------

    def _enter(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if compat.in_backward():
                self.recomputes = True
                self._at(self._backward, number)
            else:
                self._at(self._forward, number)
                self._count_for(number)

        return hook

    def _leave(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if compat.in_backward():
                return
            self._at(self._forward, 0)  # what follows belongs to the root, or is the loss
            self._count_for(0)
            if number == self._count - 1:
                self._note = self._note_loss
                self._note(self._alive)
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: self._at(self._backward, number))

        return hook

    def _take(self, number: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            size = parameter.grad.nbytes
            if number == 0 and not any(self._after[1:]):
                self._early += size
            parameter.grad = None  # the plan counts gradients by itself, in their buffers
            self._after[number] = self._alive
            if number == 0 and (any(self._after[1:]) or self._count == 1):  # before that, the loss is being computed
                self._at(self._backward, 0)

        return hook

    def _at(self, peaks: list[int], number: int) -> None:
        self._note = _into(peaks, number)
        self._note(self._alive)

    def _note_loss(self, alive: int) -> None:
        self._loss = max(self._loss, alive)

    def end_forward(self) -> None:
        """Notes that the model has returned. The loss is computed next, if the model returned none."""
        self._turned = True
        self._saved = self._alive
        self._note = self._note_loss
        self._note(self._alive)
        self._count_for(0)
        self._forward_attention = self.attention_flops

    def _count_for(self, unit: int) -> None:
        """Adds the FLOPs since the last call to the unit of the last call, and goes on with ``unit``."""
        now = self.flops + self.attention_flops
        self.forward_flops[self._unit] += now - self._counted
        self._unit, self._counted = unit, now

    @property
    def backward_flops(self) -> float:
        """FLOPs of backward, with recomputation. The backward of attention counts as two of its forwards."""
        return self.flops + self.attention_flops - self._counted + 2 * self._forward_attention

    def activations(self) -> ActivationBytes:
        """The activations of the trace."""
        return ActivationBytes(
            saved=self._saved,
            forward=tuple(self._forward),
            loss=self._loss,
            backward=tuple(self._backward),
            after_backward=tuple(self._after),
            early_root_gradients=self._early,
        )


def _into(peaks: list[int], number: int) -> Callable[[int], None]:
    """A function that raises one entry of ``peaks`` to the bytes that are alive."""

    def note(alive: int) -> None:
        peaks[number] = max(peaks[number], alive)

    return note


class _KnownFunctions(TorchFunctionMode):
    """Replaces attention by a function that saves what a GPU's kernels save, and counts the logits of the loss."""

    def __init__(self, watch: _Tracer) -> None:
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
        if func is F.multi_head_attention_forward:  # a mode does not see what a function of torch calls inside
            return _calling(func, scaled_dot_product_attention=self._attention)(*args, **given)
        return func(*args, **given)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        self._watch.attention_flops += 4.0 * query.numel() * key.shape[-2]
        return _Attention.apply(query, key, value)  # type: ignore[no-any-return, no-untyped-call]


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
