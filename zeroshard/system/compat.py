"""Every private name of torch that zeroshard uses, each with the reason. No other module may touch one."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
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


def uncompiled(module: nn.Module) -> nn.Module:
    """The module behind ``torch.compile(module)``. Any other module is returned as it is.

    The wrapper is known by the name of its child: importing its class takes half a second.
    """
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""``torch.compile`` with the options of one of the user's calls of it: backend, mode, fullgraph, dynamic and others."""


def compiled_calls(modules: Sequence[nn.Module]) -> list[Callable[..., Any] | None]:
    """What runs instead of each module's ordinary call: what ``module.compile()`` has made, or ``set_call``."""
    return [module._compiled_call_impl for module in modules]


def set_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Calls of a module go to ``call``. None: the ordinary way, hooks and forward."""
    module._compiled_call_impl = call


def ordinary_call(module: nn.Module) -> Callable[..., Any]:
    """The ordinary call of a module, with its hooks, compiled or not."""
    return module._call_impl


def compiler_of(compiled: Any) -> Compiler | None:
    """The compiler that has made a function or module. None if ``torch.compile`` has not made it.

    A function that ``torch.compile`` has made keeps it in a method that tells the options of Inductor.
    """
    tell = getattr(compiled, "get_compiler_config", None)
    return None if tell is None else cast(Compiler, tell.__closure__[0].cell_contents)


def compiled(compiler: Compiler | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function, unless there is no compiler or the user has kept torch.compile from the function."""
    return function if compiler is None or getattr(function, "_torchdynamo_disable", False) else compiler(function)


_codes: list[Any] = []
"""The code of functions that ``torch.compile`` and ``torch.compiler.disable`` make, once they are needed."""


def surrounding_compiler() -> Compiler | None:
    """The compiler of the innermost compiled function that runs now, around an untraced function that asks.

    None if that is inside another untraced function.
    """
    if "torch._dynamo" not in sys.modules:
        return None
    if not _codes:
        compiled = torch.compile(_nothing, backend="eager")
        _codes.extend((compiled.__code__, torch.compiler.disable(_nothing).__code__))
    compiled_code, untraced_code = _codes
    frame, untraced_frames = sys._getframe(), 0
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code is untraced_code:
            untraced_frames += 1
            if untraced_frames == 2:
                return None
        elif frame.f_code is compiled_code:
            return cast(Compiler, frame.f_locals["self"])
    return None


def _nothing() -> None:
    pass


def running_codes() -> Iterator[CodeType]:
    """The code of all functions that run now on this thread, innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def is_uncompiled_part(running: CodeType, function: CodeType) -> bool:
    """Whether code that runs is a function, or its part after a graph that was cut, and not what was compiled of it."""
    return (
        running.co_filename == function.co_filename
        and (
            running.co_name == function.co_name
            or running.co_name.startswith(f"torch_dynamo_resume_in_{function.co_name}_")
        )
        and function.co_firstlineno <= running.co_firstlineno <= max(line or 0 for *_, line in function.co_lines())
        and not any(name.startswith(("__compiled_fn", "__resume_at")) for name in running.co_names)
    )


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


def mesh_ranks(mesh: DeviceMesh) -> Any:
    """The ranks of a mesh as lists. Modes are off, because a mesh computes its ranks, and a dry run has no values."""
    with _disable_current_modes():
        return mesh.mesh.tolist()


def completed(tensor: Tensor) -> Tensor:
    """Waits for the functional collective that fills a tensor, if there is one, and returns the tensor."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


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


@contextmanager
def one_rank_of(world: int, rank: int) -> Iterator[None]:
    """In this context this process is one rank of a world without other ranks. Collectives move nothing."""
    from torch.distributed.tensor import debug  # here, because the import sets a variable of the environment
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # DTensor caches results by mesh. A new mesh may equal an old mesh whose process groups are gone.
    debug._clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def untraced(function: Function) -> Function:
    """Makes ``torch.compile`` break the graph at a hook instead of tracing it."""
    reason = (
        "zeroshard.shard() gathers, releases and reduces parameters here, which no graph can contain; fullgraph=True "
        "is for modules that are one unit each, as in `for block in model.blocks: block.compile(fullgraph=True)`; "
        "where a block is several units, a larger max_unit_bytes makes it one"
    )
    return cast(Function, torch.compiler.disable(function, reason=reason))


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


_connections: list[tuple[weakref.ref[Any], Any]] = []


def default_store() -> Any:
    """The key-value store of the default process group, where ranks post their progress.

    The connection is separate, so that no other use can block it. All models of a process share one connection, because
    opening it takes time and resources at rank 0.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    if not _connections or _connections[0][0]() is not store:
        try:
            own = store.clone()
        except (AttributeError, RuntimeError):
            own = store
        if own is store:
            return own
        _connections[:] = [(weakref.ref(store), own)]  # weak, so that the store and its server end with their group
    return _connections[0][1]


def private_store() -> Any:
    """A key-value store that no other process has."""
    stores: Any = dist  # its annotations do not list the stores
    return stores.HashStore()


def host_messages(name: str, rank: int, world: int, address: str | None, patience: timedelta) -> Any:
    """A group of Gloo for single messages between the hosts of two ranks, which torch does not know of.

    Two ranks connect when they first talk. Connections between all of thousands of ranks would take long to make.
    ``address`` is where the other ranks reach this one. Without it, or if GLOO_SOCKET_IFNAME is set, torch decides.
    """
    gloo: Any = dist.ProcessGroupGloo
    interface, _, _ = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")
    where = {"interface": interface} if interface else {} if address is None else {"hostname": address}
    options = gloo._Options()
    options._devices = [gloo.create_device(**where, lazy_init=True) if where else gloo.create_default_device(True)]
    options._timeout, options._threads = patience, 1
    stores: Any = dist
    return gloo(stores.PrefixStore(name, dist.distributed_c10d._get_default_store()), rank, world, options)


def together(group: dist.ProcessGroup) -> AbstractContextManager[Any]:
    """All-gathers of NCCL that begin inside are one operation of the device, which begins at the end."""
    return cast(AbstractContextManager[Any], dist.distributed_c10d._coalescing_manager(group))


@contextmanager
def errors_left_to_caller() -> Iterator[None]:
    """Groups of NCCL that are made inside do not end the process when a collective fails. The user's setting counts.

    A group that finds an error would also wait for a minute before it can be ended, so that debug files can be written.
    """
    with _variables({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}):
        yield


@contextmanager
def errors_of_earlier_starts_ignored() -> Iterator[None]:
    """A default group of NCCL that is made inside does not look for errors of other groups. The user's setting counts.

    It would look for a key in the store that a group with an error writes. torchrun keeps the store when it restarts
    ranks: they find the key of the failed start, wait for eight minutes, and end the process.
    """
    with _variables({"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}):
        yield


@contextmanager
def _variables(settings: dict[str, str]) -> Iterator[None]:
    """Inside, environment variables have these values. Those that the user has set keep theirs."""
    added = settings.keys() - os.environ.keys()
    os.environ.update({name: settings[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def error_of_earlier_start() -> bool:
    """Whether the store has the key by which a group of NCCL tells all ranks of an error."""
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return bool(store.check(["exception_dump"]))


def abort(group: dist.ProcessGroup) -> None:
    """Ends the collectives of a group of NCCL on this rank's device, whatever the other ranks do."""
    cast(Any, group).abort()


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
