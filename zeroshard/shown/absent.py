"""Parameters whose value is not there: every function of torch that is given one asks for the value first.

A parameter keeps its object. While its value is absent, its *class* is another one: a subclass of its own class whose
``__torch_function__`` comes here. Facts, such as shape, dtype and hooks, are answered without the value. For everything
else the model's ``Reader`` brings the value, or raises with the remedy. A parameter that is shown to the model's own
passes has its own class, so it costs nothing.

In stage 3 a parameter that user code reads keeps the class while its value is there. So every use of it is seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, GetSetDescriptorType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..system import compat, compat_compile
from ..system.structures import tensors_in

VALUE_ATTRIBUTES = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes of a tensor that show its values. All other attributes are facts."""

FACTS = (
    {"numel", "nelement", "size", "dim", "ndimension", "element_size", "get_device", "__len__", "__hash__", "has_names"}
    | {"is_floating_point", "is_complex", "is_signed", "is_inference", "is_pinned", "is_conj", "is_neg", "is_same_size"}
    | {"is_tensor", "is_distributed", "result_type", "can_cast", "requires_grad_", "retain_grad", "detach_"}
    | {"register_hook", "register_post_accumulate_grad_hook"}
)
"""Functions that need no value."""

LIKE = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"} | {
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_tensor",
}
"""Functions that make another tensor of the same dtype on the same device."""

STRIDES = {"stride", "is_contiguous"}
"""Functions that ask for the layout. A placeholder has another layout than the parameter."""

AUTOGRAD = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
"""Functions that take a parameter only to say which gradients are wanted."""

WRITING = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__imod__", "__ipow__"}
"""Functions that change their first argument, besides those whose names end in an underscore."""


class Source(Protocol):
    """Has the values of some parameters: their flat."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]: ...

    @property
    def reader(self) -> Reader | None:
        """Brings the values to user code. None until the model is sharded."""

    @property
    def present(self) -> bool:
        """Whether the values are there."""

    @property
    def watched(self) -> bool:
        """Whether every use of the parameters is seen."""

    def name_of(self, parameter: Tensor) -> str:
        """The name of one of the parameters, in the model."""


class Use(NamedTuple):
    """What user code does with absent parameters."""

    function: str
    """The name of torch's function, as users write it."""
    sources: tuple[Source, ...]
    names: tuple[str, ...]
    """The parameters' names, for messages."""
    written: frozenset[Source]
    """Sources of parameters that the function changes in place."""

    @property
    def shows_data(self) -> bool:
        """Whether user code gets a tensor of its own on the parameter's memory. Nobody sees a write to it."""
        return self.function in (".data", "to_local()")


class Reader(Protocol):
    """Brings the values of one model's absent parameters to user code."""

    def bring(self, use: Use) -> None:
        """Makes the values readable, or raises. Collective where parameters are shards."""

    def used_in_graph(self, use: Use, nodes: Iterable[Any]) -> None:
        """Called after ``bring`` if autograd may need the values again: these nodes of its graph stand for the use."""


_sources: weakref.WeakValueDictionary[int, Source] = weakref.WeakValueDictionary()
"""The source of each parameter, by id. Weak: a parameter that a user keeps must not keep the model."""
_absent_classes: dict[type, type] = {}
_own_classes: dict[type, type] = {}


def register(source: Source) -> None:
    """Notes the parameters of a source, so that their values can be found."""
    for parameter in source.parameters:
        _sources[id(parameter)] = source


def source_of(parameter: Tensor) -> Source | None:
    """The source that a parameter belongs to. None if no sharded model has the parameter."""
    return _sources.get(id(parameter))


def is_absent(tensor: object) -> bool:
    """Whether a tensor is a parameter whose value is absent, or watched."""
    return type(tensor) in _own_classes


def mark_absent(parameters: Iterable[Tensor]) -> None:
    """From now on every use of these parameters asks for their values."""
    for parameter in parameters:
        kind = type(parameter)
        if kind not in _own_classes:
            parameter.__class__ = _absent_classes.get(kind) or _absent_class(kind)


def mark_present(parameters: Iterable[Tensor]) -> None:
    """Gives parameters their own class back."""
    for parameter in parameters:
        own = _own_classes.get(type(parameter))
        if own is not None:
            parameter.__class__ = own


@contextmanager
def lifted(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Inside, absent parameters have their own class, whether or not their values are there."""
    marked = [parameter for parameter in parameters if is_absent(parameter)]
    mark_present(marked)
    try:
        yield
    finally:
        for parameter in marked:
            source = source_of(parameter)
            if source is None or source.watched:  # else a pass has shown the parameters in the meantime
                mark_absent([parameter])


def _absent_class(own: type) -> type:
    if compat.is_fake_class(own):  # a dry run has no values to miss
        return own
    members: dict[str, Any] = {
        "__torch_function__": classmethod(_torch_function),
        "__new__": lambda cls, *args, **kwargs: own(*args, **kwargs),  # deepcopy and others make ordinary parameters
        "__repr__": _describe,
        "__module__": own.__module__,
        "__doc__": f"A {own.__name__} whose value is absent.",
    }
    for kind in own.__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, GetSetDescriptorType) and name not in VALUE_ATTRIBUTES and name[:2] != "__":
                members.setdefault(name, _fact(member))
            elif isinstance(member, FunctionType) and kind not in (Tensor, object) and name[:2] != "__":
                members.setdefault(name, _method(member))  # to_local() of a DTensor, say: torch does not pass it on
    for name in ("__deepcopy__", "__reduce_ex__"):
        members[name] = _method(getattr(own, name))
    absent = type(own)(f"Absent{own.__name__}", (own,), members)
    _absent_classes[own], _own_classes[absent] = absent, own
    return absent


def _fact(descriptor: GetSetDescriptorType) -> property:
    """An attribute that is answered without the value, and without the way through ``__torch_function__``."""

    def get(tensor: Tensor) -> Any:
        with compat.plain():
            return descriptor.__get__(tensor)

    def put(tensor: Tensor, value: Any) -> None:
        with compat.plain():
            descriptor.__set__(tensor, value)

    def delete(tensor: Tensor) -> None:
        with compat.plain():
            descriptor.__delete__(tensor)

    return property(get, put, delete)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the parameter's own class that needs the value."""

    def call(parameter: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _answer(function, f"{function.__name__}()", (parameter, *args), kwargs)

    return call


def _describe(parameter: nn.Parameter) -> str:
    """The values, if they are there. Else the facts: a text must not need the other ranks."""
    source = source_of(parameter)
    if source is not None and source.present:
        with lifted([parameter]):
            return repr(parameter)
    kind, name = _own_classes[type(parameter)].__name__, "" if source is None else f" {source.name_of(parameter)!r}"
    facts = f"shape={tuple(parameter.shape)}, dtype={parameter.dtype}, device={str(parameter.device)!r}"
    return f"{kind}{name} (its value is not here; {facts}, requires_grad={parameter.requires_grad})"


@compat_compile.untraced
def _torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        attribute = func.__self__.__name__
        if name == "__set__":
            raise RuntimeError(
                f"{_title(args[0])} cannot be pointed at other memory after shard(), as by an assignment to "
                f".{attribute}; write values inside `with zeroshard.gathered(model, write=True):`"
            )
        return _answer(func, f".{attribute}", args, kwargs)
    if name in FACTS or (name == "type" and len(args) + len(kwargs) == 1):
        with compat.plain():
            return func(*args, **kwargs)
    if func in AUTOGRAD:
        with lifted(list(tensors_in((args, kwargs)))):
            return func(*args, **kwargs)
    if name in LIKE | STRIDES and args and is_absent(args[0]) and not isinstance(args[0], DTensor):
        return _answer_from_layout(func, args, kwargs)
    return _answer(func, f"{name}()", args, kwargs)


def _answer_from_layout(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls the function with a tensor without memory in the parameter's place."""
    parameter = args[0]
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    if function.__name__ in LIKE:
        kwargs = {"device": parameter.device, "dtype": parameter.dtype, **kwargs}
    return function(empty, *args[1:], **kwargs)


def _answer(function: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Brings the values of all absent parameters among the arguments, then calls the function."""
    parameters = [tensor for tensor in tensors_in((args, kwargs)) if is_absent(tensor)]
    changed = {id(p) for p in _changed_arguments(function, args, kwargs) if is_absent(p)}
    by_reader: dict[Reader, list[Tensor]] = {}
    for parameter in parameters:
        source = source_of(parameter)
        if source is None:
            raise RuntimeError(f"{_title(parameter)} belonged to a sharded model that is gone, and its value with it")
        if source.reader is not None:
            by_reader.setdefault(source.reader, []).append(parameter)
    uses = {reader: _use(name, members, changed) for reader, members in by_reader.items()}
    for reader, use in uses.items():
        reader.bring(use)
    with lifted(parameters):
        result = function(*args, **kwargs)
    nodes = [tensor.grad_fn for tensor in tensors_in(result) if tensor.grad_fn is not None]
    if nodes:
        for reader, use in uses.items():
            reader.used_in_graph(use, nodes)
    return result


def _use(function: str, parameters: list[Tensor], changed: set[int]) -> Use:
    sources = [source for parameter in parameters if (source := source_of(parameter)) is not None]
    names = tuple(source.name_of(parameter) for source, parameter in zip(sources, parameters, strict=True))
    written = frozenset(source for source, p in zip(sources, parameters, strict=True) if id(p) in changed)
    return Use(function, tuple(dict.fromkeys(sources)), names, written)


def _changed_arguments(function: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that a function writes to."""
    name = function.__name__
    if name in WRITING or (name[-1:] == "_" and name[-2:] != "__"):
        yield from tensors_in(next(iter((*args, *kwargs.values())), None))
    yield from tensors_in(kwargs.get("out"))


def _title(parameter: Tensor) -> str:
    source = source_of(parameter)
    if source is None:
        return f"a parameter of shape {tuple(parameter.shape)}"
    return f"parameter {source.name_of(parameter)!r}"
