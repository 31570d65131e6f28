"""The private names of torch that zeroshard uses, each with the reason. No other module may touch one.

Those of ``torch.compile`` are in ``compat_compile``, those of process groups in ``compat_groups``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .structures import map_tensors, tensors_in

Function = TypeVar("Function", bound=Callable[..., Any])
Subclass = TypeVar("Subclass", bound=Tensor)


def in_backward() -> bool:
    """Whether this thread is inside a backward pass. Recomputation calls forward hooks there."""
    return bool(torch._C._current_graph_task_id() != -1)


def keeps_graph() -> bool:
    """Whether the backward that runs has ``retain_graph``, so that another one may follow through the same graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def in_transform() -> bool:
    """Whether this code runs inside ``torch.func``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def transform_differentiates() -> bool:
    """Whether the values computed now, inside ``torch.func``, are needed again for derivatives."""
    levels = torch._C._functorch.get_interpreter_stack() or []
    return torch.is_grad_enabled() or any(level.key() != TransformType.Vmap for level in levels)


def outside_transforms() -> AbstractContextManager[Any]:
    """In this context the code runs as if ``torch.func`` were not there. Tensors have memory again."""
    return temporarily_clear_interpreter_stack()


def after_backward(callback: Callable[[], None]) -> None:
    """Runs ``callback`` at the end of the backward pass that runs now. DDP and FSDP use the same queue."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def run_backward(loss: Tensor) -> None:
    """The same as ``loss.backward()``, but modes for torch's functions stay active, so that recomputation sees them."""
    engine, ones = torch.autograd.Variable._execution_engine, torch.ones_like(loss)
    engine.run_backward((loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True)


_NOTHING = nullcontext()


def label(phase: str, *titles: str) -> AbstractContextManager[Any]:
    """A name for a phase in the profiler's trace: ``phase``, and the units or flats that it is about.

    Next to free while no profiler runs; the public function costs 10 µs.
    """
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return torch.profiler.record_function(" ".join((phase, *titles)))
    return _NOTHING


def unrecorded() -> AbstractContextManager[None]:
    """Inside, the profiler records no operation. Free while no profiler runs.

    For messages of Gloo that begin here and end in a later call. If the profiler stops in between, torch 2.13 writes
    the time of their end to memory that it has freed, and the process dies at some later point.
    """
    return _without_records() if torch.autograd._profiler_enabled() else _NOTHING  # type: ignore[attr-defined]


@contextmanager
def _without_records() -> Iterator[None]:
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def watch_shortages(told: Callable[[int, int, int, int], None]) -> None:
    """Calls ``told`` (device, bytes asked for, allocated, free) when a GPU runs out of memory, before torch raises.

    The call happens on any thread, also on the threads of autograd, whose exceptions no hook sees. It cannot be undone.
    """
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None:
        attach = getattr(torch._C, "_cuda_attachOutOfMemoryObserver", None)
    if attach is not None:
        attach(told)


def segments_expand() -> bool:
    """Whether the CUDA allocator reserves memory in expandable segments. No public function tells."""
    return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])


def expand_segments() -> None:
    """Turns expandable segments on, for memory that is reserved from now on. Other settings stay as they are."""
    settings = torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]
    torch._C._accelerator_setAllocatorSettings(",".join(filter(None, [settings, "expandable_segments:True"])))


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """The innermost pair of hooks for tensors that autograd saves. No public function tells."""
    found: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = (
        torch._C._autograd._top_saved_tensors_default_hooks(True)
    )
    assert found is not None
    return found


def version(tensor: Tensor) -> int:
    """How many times a tensor was written in place, as autograd counts."""
    return int(tensor._version)


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module itself by name, also buffers that are None. Faster than ``named_buffers()``."""
    return module._buffers


def buffer_owners(model: nn.Module) -> list[nn.Module]:
    """The modules that have buffers themselves, in the order of ``modules()``, whose generators take far longer."""
    seen: set[nn.Module | None] = {None}
    owners, waiting = [], [model]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            if module._modules:
                waiting.extend(reversed(module._modules.values()))  # type: ignore[arg-type]
            if module._buffers:
                owners.append(module)
    return owners


def convert_buffers(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Does to the buffers of a module itself what ``.to()`` does."""
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)


def changed(layers: Sequence[tuple[nn.Module, int]]) -> list[nn.Module]:
    """Layers with forward hooks, or with another number of attributes than ``count_attributes`` returned before.

    One call, because every forward of a unit asks for all its layers.
    """
    return [
        layer
        for layer, count in layers
        if layer._forward_hooks or layer._forward_pre_hooks or count_attributes(layer) != count
    ]


def is_last_forward_hook(module: nn.Module, hook: Callable[..., Any]) -> bool:
    """Whether no forward hook of a module runs after this one."""
    return next(reversed(module._forward_hooks.values()), None) is hook


def has_global_hooks() -> bool:
    """Whether there are forward hooks for all modules."""
    return bool(nn.modules.module._has_any_global_hook())


def outline(modules: list[nn.Module]) -> list[tuple[type, int]]:
    """The class of each module and its number of children. Cheap enough for every forward."""
    return [(module.__class__, len(module._modules)) for module in modules]


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether a buffer of a module enters its state dict."""
    return name not in module._non_persistent_buffers_set


def local_tensor(tensor: Tensor) -> Tensor:
    """The local part of a DTensor itself, not a view as ``to_local()`` returns. Other tensors stay as they are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def bases(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that these tensors are views of. A view keeps the object of its base, and with it the memory."""
    return [tensor._base for tensor in tensors if tensor._base is not None]


def set_data(tensors: Sequence[Tensor], memories: Sequence[Tensor]) -> None:
    """``point`` for tensors that are no DTensors, whatever their classes do. One call for every gather and release."""
    with plain():
        for tensor, memory in zip(tensors, memories, strict=True):
            tensor.data = memory


def point(tensor: Tensor, memory: Tensor) -> None:
    """Gives a tensor other memory. The object stays.

    For a plain tensor this is ``.data =``. For a DTensor it replaces the local part, which ``.data =`` does not change.
    The DTensor itself has a dtype and a device. If these change, its content is exchanged too. It also has a place in
    memory, and ``torch.compile`` raises if that is not its local part's. Placeholders, which no graph sees, are at 0.
    """
    if not isinstance(tensor, DTensor):
        tensor.data = memory
    elif tensor.dtype is memory.dtype and tensor.device == memory.device:
        if memory.storage_offset() not in (0, tensor.storage_offset()):
            tensor.data = _distributed(memory, tensor)
        tensor._local_tensor = memory
    else:
        real: Tensor = _distributed(memory, tensor)
        if isinstance(tensor, nn.Parameter):
            real = nn.Parameter(real, requires_grad=tensor.requires_grad)
        real.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, real)


def _distributed(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor with this local part, and the shape and placements of another."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


plain: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
"""In this context ``__torch_function__`` of tensor subclasses is not called."""


COMPATIBLE = "_has_compatible_shallow_copy_type"
"""The function by which ``.to()`` asks whether a tensor can take the memory of another."""
IS_VIEW = "_is_view"
"""One of the functions by which ``torch.compile`` describes the gradients of a graph's parameters."""
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
"""The name of the function by which ``torch.amp.GradScaler`` unscales gradients."""


def grads(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """``grad`` of each parameter, whatever their classes do. One call, because every pass asks for all parameters."""
    read = cast(Any, Tensor.grad).__get__
    with plain():
        return [read(parameter) for parameter in parameters]


def set_grads(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Sets ``grad`` of each parameter, whatever their classes do."""
    write = cast(Any, Tensor.grad).__set__
    with plain():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            write(parameter, gradient)


def is_fake_class(kind: type) -> bool:
    """Whether tensors of this class have shapes but no values."""
    return issubclass(kind, FakeTensor)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape but no values, as in a dry run without a device."""
    return isinstance(local_tensor(tensor), FakeTensor)


def pointer(tensor: Tensor) -> int:
    """The address of a tensor's memory. For a fake tensor, which has no memory, its storage's identity."""
    return storage_key(tensor) if is_fake(tensor) else tensor.data_ptr()


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """``version`` of each. One call, because every gather and release asks for all parameters."""
    read: Callable[[Tensor], int] = Tensor._version.__get__  # type: ignore[attr-defined]
    return [read(tensor) for tensor in tensors]


def pointers(tensors: Sequence[Tensor]) -> list[int]:
    """``pointer`` of each. Either all are fake, or none."""
    if tensors and is_fake(tensors[0]):
        return [pointer(tensor) for tensor in tensors]
    return [tensor.data_ptr() for tensor in tensors]


def storage_key(tensor: Tensor) -> int:
    """A number that tells storages apart."""
    return int(tensor.untyped_storage()._cdata)


def storage_sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of the storages behind tensors, each storage once, by a number that tells storages apart."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in storages}


def storage_uses(tensor: Tensor) -> int:
    """How many tensors share a tensor's storage. The number grows if somebody stores a view."""
    return int(torch._C._storage_Use_Count(storage_key(tensor)))


def without_values() -> AbstractContextManager[Any]:
    """In this context new tensors have shapes but no values, and operations compute only shapes."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class OperationMode(TorchDispatchMode):
    """In this context ``run`` is called in place of each operation of torch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one operation. A subclass defines this."""
        raise NotImplementedError


def without_memory(kind: type[Subclass], like: Tensor, dtype: torch.dtype) -> Subclass:
    """A tensor of a subclass that has ``__torch_dispatch__``: the shape and device of another tensor, and no memory."""
    made: Subclass = Tensor._make_wrapper_subclass(kind, like.shape, dtype=dtype, device=like.device)
    return made


def writes(operation: Any) -> bool:
    """Whether an operation changes one of its arguments."""
    return bool(operation._schema.is_mutable)


def written(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation changes."""
    named = [*zip(operation._schema.arguments, args, strict=False)]
    named += [(argument, kwargs[argument.name]) for argument in operation._schema.arguments if argument.name in kwargs]
    return [value for argument, value in named if argument.alias_info is not None and argument.alias_info.is_write]


def operation_name(operation: Any) -> str:
    """The name of an operation, such as ``empty_like``, without its overload."""
    return str(operation._opname)


def _flops(count: Callable[..., float], args: Any, kwargs: Any, result: Any) -> float:
    """FLOPs of one operation.

    In torch 2.11 the formula for attention refuses fewer heads for keys and values than for queries. Then it is asked
    as if all had the same number of heads.
    """
    try:
        return count(*args, **kwargs, out_val=result)
    except AssertionError:
        heads = max(tensor.shape[1] for tensor in tensors_in(args) if tensor.dim() == 4)

    def with_all_heads(value: Tensor) -> Tensor:
        if value.dim() != 4:
            return value
        return torch.empty(value.shape[0], heads, *value.shape[2:], dtype=value.dtype, device="meta")

    return count(*map_tensors(with_all_heads, args), **kwargs, out_val=result)


class OperationWatch(OperationMode):
    """In this context ``see`` is called with the results of each operation of torch. For DTensors: local parts."""

    flops = 0.0
    """FLOPs of products and convolutions so far."""

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operation(*args, **kwargs)
        count = flop_registry.get(operation.overloadpacket)  # torch's own FlopCounterMode has hooks that leak tensors
        if count is not None:
            self.flops += _flops(count, args, kwargs, result)
        self.see([local_tensor(tensor) for tensor in tensors_in(result)])
        return result

    def see(self, tensors: list[Tensor]) -> None:
        """Gets the results of one operation. A subclass defines this."""
        raise NotImplementedError


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each source into its target. On CUDA one kernel copies many small tensors."""
    torch._foreach_copy_(targets, sources)


def products(tensors: list[Tensor], factor: Tensor) -> list[Tensor]:
    """Each tensor times the factor, in the dtype that ``*`` gives. One call, though a kernel for each tensor."""
    return list(torch._foreach_mul(tensors, [factor] * len(tensors)))


def zero_all(tensors: list[Tensor]) -> None:
    """Fills each tensor with zeros. On CUDA one kernel fills many."""
    if tensors:
        torch._foreach_zero_(tensors)


def norms(tensors: list[Tensor], dtype: torch.dtype, order: float = 2.0) -> list[Tensor]:
    """The norm of each tensor, computed in ``dtype``. On CUDA one kernel serves many tensors."""
    return list(torch._foreach_norm(tensors, order, dtype=dtype)) if tensors else []


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Marks an optimizer as stepped. Schedulers warn if their optimizer has never stepped."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def adopt_step_hooks(new: torch.optim.Optimizer, old: torch.optim.Optimizer) -> None:
    """Lets step hooks that the user registered on the old optimizer run on the new one."""
    new._optimizer_step_pre_hooks.update(old._optimizer_step_pre_hooks)
    new._optimizer_step_post_hooks.update(old._optimizer_step_post_hooks)


def replace_conversion(module: nn.Module, convert: Callable[..., nn.Module]) -> None:
    """Replaces the method of a module that ``.to()``, ``.half()`` and others call. It has no public name."""
    module._apply = convert  # type: ignore[method-assign]


def count_attributes(module: nn.Module) -> int:
    """How many attributes a module has, without the attribute that ``replace_conversion`` sets."""
    attributes = vars(module)
    return len(attributes) - ("_apply" in attributes)
