"""Every private name of torch that zeroshard uses, each with the reason. No other module may touch one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

Function = TypeVar("Function", bound=Callable[..., Any])


def in_backward() -> bool:
    """Whether this thread runs inside a backward pass: recomputation calls forward hooks there."""
    return bool(torch._C._current_graph_task_id() != -1)


def after_backward(callback: Callable[[], None]) -> None:
    """Runs ``callback`` when the backward pass that is running now has ended. DDP and FSDP use the same queue."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_UNLABELLED = nullcontext()


def label(name: str) -> AbstractContextManager[Any]:
    """A name for a phase in the profiler's trace. Costs nothing while no profiler runs; the public one 10 µs."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return torch.profiler.record_function(name)
    return _UNLABELLED


def version(tensor: Tensor) -> int:
    """How often a tensor was written in place, as autograd counts it."""
    return int(tensor._version)


def untraced(function: Function) -> Function:
    """Keeps ``torch.compile`` from tracing a hook: it breaks the graph there instead."""
    return cast(Function, torch.compiler.disable(function))


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each source into its target: one kernel for many small tensors on CUDA."""
    torch._foreach_copy_(targets, sources)


def norms(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The 2-norm of each tensor, computed in ``dtype``: one kernel for many tensors on CUDA."""
    return list(torch._foreach_norm(tensors, 2.0, dtype=dtype)) if tensors else []


def default_store() -> Any:
    """The key-value store behind the default process group, where ranks post how far they are."""
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        return store.clone()  # a connection of its own, which nobody else can block
    except (AttributeError, RuntimeError):
        return store


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tells schedulers built on this handle that it has stepped, for they warn on a handle that never does."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def adopt_step_hooks(new: torch.optim.Optimizer, old: torch.optim.Optimizer) -> None:
    """Lets step hooks that the user registered on the old handle fire on the new one."""
    new._optimizer_step_pre_hooks.update(old._optimizer_step_pre_hooks)
    new._optimizer_step_post_hooks.update(old._optimizer_step_post_hooks)


def wrap_conversion(module: nn.Module, wrap: Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]) -> None:
    """Wraps what ``.to()``, ``.half()``, ``.cuda()`` and their kin go through on one module; no public name does."""
    module._apply = wrap(module._apply)  # type: ignore[method-assign]


def prepare_for_writing(tensors: list[Tensor]) -> None:
    """Counts a write on each tensor, so that a backward through its old value raises as in plain torch."""
    if tensors:
        torch.autograd.graph.increment_version(tensors)
