"""Every private name of torch that zeroshard uses, each with the reason. No other module may touch one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from .structures import map_tensors, tensors_in

Function = TypeVar("Function", bound=Callable[..., Any])


def in_backward() -> bool:
    """Whether this thread runs inside a backward pass: recomputation calls forward hooks there."""
    return bool(torch._C._current_graph_task_id() != -1)


def after_backward(callback: Callable[[], None]) -> None:
    """Runs ``callback`` when the backward pass that is running now has ended. DDP and FSDP use the same queue."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def run_backward(loss: Tensor) -> None:
    """The same as ``loss.backward()``, which leaves a mode for torch's functions, so recomputation would not see it."""
    engine, ones = torch.autograd.Variable._execution_engine, torch.ones_like(loss)
    engine.run_backward((loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)


_UNLABELLED = nullcontext()


def label(name: str) -> AbstractContextManager[Any]:
    """A name for a phase in the profiler's trace. Costs nothing while no profiler runs; the public one 10 µs."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return torch.profiler.record_function(name)
    return _UNLABELLED


def watch_shortages(told: Callable[[int, int, int, int], None]) -> None:
    """Calls ``told`` (device, bytes asked for, allocated, free) when a GPU's memory is out, before that is raised.

    On whatever thread it happens, autograd's too, whose exceptions no hook sees. It stays for the process.
    """
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None:
        attach = getattr(torch._C, "_cuda_attachOutOfMemoryObserver", None)
    if attach is not None:
        attach(told)


def version(tensor: Tensor) -> int:
    """How often a tensor was written in place, as autograd counts it."""
    return int(tensor._version)


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers by name, those among them that are None, without a walk through its children."""
    return module._buffers


def empty_buffers(module: nn.Module) -> list[str]:
    """Names of a module's buffers that are None, which ``named_buffers()`` leaves out."""
    return [name for name, buffer in module._buffers.items() if buffer is None]


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks of its own run around a module's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_global_hooks() -> bool:
    """Whether hooks run around every module's forward."""
    return bool(nn.modules.module._has_any_global_hook())


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether a buffer of a module enters its state dict."""
    return name not in module._non_persistent_buffers_set


def local_tensor(tensor: Tensor) -> Tensor:
    """A DTensor's local part itself, where ``to_local()`` gives a view of it; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def point(tensor: Tensor, memory: Tensor) -> None:
    """Makes a tensor, or its local part, the given memory, and keeps the object; what ``.data =`` does to plain ones.

    On a DTensor ``.data =`` changes the outside alone. The outside knows dtype and device, so where these change it is
    exchanged too.
    """
    if not isinstance(tensor, DTensor):
        tensor.data = memory
    elif tensor.dtype is memory.dtype and tensor.device == memory.device:
        tensor._local_tensor = memory
    else:
        real: Tensor = DTensor.from_local(
            memory,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        if isinstance(tensor, nn.Parameter):
            real = nn.Parameter(real, requires_grad=tensor.requires_grad)
        real.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, real)


def mesh_ranks(mesh: DeviceMesh) -> Any:
    """The ranks of a mesh as lists. It computes them when asked, which a dry run without values must not see."""
    with _disable_current_modes():
        return mesh.mesh.tolist()


def completed(tensor: Tensor) -> Tensor:
    """A tensor that a functional collective may still be filling, once it is filled."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values, as in a dry run without a device."""
    return isinstance(local_tensor(tensor), FakeTensor)


def pointer(tensor: Tensor) -> int:
    """Where a tensor's memory begins; a fake one has none, and its storage's identity stands in."""
    return int(tensor.untyped_storage()._cdata) if is_fake(tensor) else tensor.data_ptr()


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """``version`` of each: asked for all parameters at every gather and release."""
    return [tensor._version for tensor in tensors]


def pointers(tensors: Sequence[Tensor]) -> list[int]:
    """``pointer`` of each; all have memory, or none has."""
    if tensors and is_fake(tensors[0]):
        return [pointer(tensor) for tensor in tensors]
    return [tensor.data_ptr() for tensor in tensors]


def storage_key(tensor: Tensor) -> int:
    """Tells storages apart."""
    return int(tensor.untyped_storage()._cdata)


def without_values() -> AbstractContextManager[Any]:
    """Inside, new tensors have shapes and no values, and operations compute shapes alone."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class OperationMode(TorchDispatchMode):
    """Inside, ``run`` is called in place of each operation of torch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """For those who write one."""
        raise NotImplementedError


def writes(operation: Any) -> bool:
    """Whether an operation changes one of its arguments."""
    return bool(operation._schema.is_mutable)


def operation_name(operation: Any) -> str:
    """As in ``empty_like``, without its kinds of arguments."""
    return str(operation._opname)


def _flops(count: Callable[..., float], args: Any, kwargs: Any, result: Any) -> float:
    """Of one operation. Attention's formula of torch 2.11 refuses fewer heads of keys and values than of queries."""
    try:
        return count(*args, **kwargs, out_val=result)
    except AssertionError:
        heads = max(tensor.shape[1] for tensor in tensors_in(args) if tensor.dim() == 4)

    def with_all_heads(value: Tensor) -> Tensor:
        if value.dim() != 4:
            return value
        return torch.empty(value.shape[0], heads, *value.shape[2:], dtype=value.dtype, device="meta")

    return count(*map_tensors(with_all_heads, args), **kwargs, out_val=result)


class OperationWatch(TorchDispatchMode):
    """Inside, ``see`` is called with the tensors that each operation of torch gives; of DTensors, with local parts."""

    flops = 0.0
    """Of products and convolutions so far."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)  # not torch's own mode for it, whose hooks keep tensors alive
        if count is not None:
            self.flops += _flops(count, args, kwargs or {}, result)
        self.see([local_tensor(tensor) for tensor in tensors_in(result)])
        return result

    def see(self, tensors: list[Tensor]) -> None:
        """For those who watch to write."""
        raise NotImplementedError


@contextmanager
def watch_functional_collectives(see: Callable[[str, int, int], None]) -> Iterator[None]:
    """Inside, ``see`` is told of every functional collective: its name, elements of the whole, and bytes of each."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.namespace == "_c10d_functional":
                largest = max(tensors_in((args, result)), key=Tensor.numel, default=None)
                if largest is not None:
                    see(func._opname, largest.numel(), largest.itemsize)
            return result

    with Watch():  # type: ignore[no-untyped-call]
        yield


@contextmanager
def one_rank_of(world: int, rank: int) -> Iterator[None]:
    """Inside, this process is one rank of a world whose other ranks are not there; collectives move nothing."""
    from torch.distributed.tensor import debug  # not above: importing it sets a variable of the environment
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # DTensor remembers results with the mesh they were found on, which equals one whose groups are gone by now.
    debug._clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def calling(function: Callable[..., Any], **others: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function of torch's that calls others in place of those of these names; torch stays as it is."""
    if not isinstance(function, FunctionType):
        return function
    known = {**function.__globals__, **others}
    copied = FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def untraced(function: Function) -> Function:
    """Keeps ``torch.compile`` from tracing a hook: it breaks the graph there instead."""
    return cast(Function, torch.compiler.disable(function))


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each source into its target: one kernel for many small tensors on CUDA."""
    torch._foreach_copy_(targets, sources)


def norms(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The 2-norm of each tensor, computed in ``dtype``: one kernel for many tensors on CUDA."""
    return list(torch._foreach_norm(tensors, 2.0, dtype=dtype)) if tensors else []


_connections: list[tuple[weakref.ref[Any], Any]] = []


def default_store() -> Any:
    """The key-value store behind the default process group, where ranks post how far they are.

    Over a connection of its own, which nobody else can block: one for all models of a process, as it takes time and a
    place at rank 0 to open.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    if not _connections or _connections[0][0]() is not store:
        try:
            own = store.clone()
        except (AttributeError, RuntimeError):
            own = store
        if own is store:
            return own
        _connections[:] = [(weakref.ref(store), own)]  # the store itself ends with its group, and its server with it
    return _connections[0][1]


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


def count_attributes(module: nn.Module) -> int:
    """How many attributes a module has, without the one that ``wrap_conversion`` sets. Looks at none of them."""
    attributes = vars(module)
    return len(attributes) - ("_apply" in attributes)


def prepare_for_writing(tensors: list[Tensor]) -> None:
    """Counts a write on each tensor, so that a backward through its old value raises as in plain torch."""
    if tensors:
        torch.autograd.graph.increment_version(tensors)
