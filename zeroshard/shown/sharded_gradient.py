"""What ``parameter.grad`` is where the averaged gradient is a shard: a tensor that stands for the whole gradient.

A ``ShardedGradient`` has the shape, dtype and device of the gradient, and no memory. Every function of torch that is
given one comes to ``__torch_function__``:

- **facts**, such as shape and dtype, are answered at once.
- **element-wise functions** (``abs``, ``isfinite``, ...) give another stand-in, which remembers the function.
- **reductions** (norms, ``sum``, ``max``, ``all``, ...) are answered for the whole gradient. That is a collective.
- **changes in place** apply to this rank's part. A factor (``mul_``, ``div_``) is only noted: the update applies it.

Everything else needs the whole gradient, and raises with the remedy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from ..system import compat, compat_compile
from ..system.structures import map_tensors, tensors_in
from .absent import FACTS, LIKE, STRIDES
from .factors import Factor
from .question import FINITE, Elementwise, Question, parse

REMEDY = "inside `with zeroshard.gathered_gradients(model):`, on all ranks, gradients are whole"

_ELEMENTWISE = """
abs absolute neg negative positive square sqrt rsqrt pow __rpow__ exp log log2 log10 log1p sign sgn reciprocal
tanh sigmoid relu floor ceil round trunc nan_to_num clamp clip clamp_min clamp_max mul multiply div divide
true_divide __rdiv__ __rtruediv__ add sub subtract __rsub__ rsub eq ne lt le gt ge not_equal less less_equal
greater greater_equal isfinite isnan isinf isposinf isneginf logical_not bitwise_not __invert__ logical_and
logical_or __and__ __or__ bitwise_and bitwise_or float double half bfloat16 bool int long to type
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
"""Functions that map each element by itself, if their other arguments are numbers."""

_IN_PLACE = """
add_ sub_ subtract_ mul_ multiply_ div_ divide_ true_divide_ clamp_ clip_ clamp_min_ clamp_max_ copy_ fill_
nan_to_num_ sign_ sgn_ neg_ negative_ abs_ absolute_ sqrt_ square_ pow_ tanh_ round_ floor_ ceil_ trunc_
reciprocal_ addcmul_ addcdiv_ lerp_ masked_fill_ relu_ sigmoid_ exp_ log_
"""
IN_PLACE = frozenset(_IN_PLACE.split())
"""Functions that change each element by itself. Tensors among their arguments are cut to this rank's part."""

SCALING = {"mul_": False, "multiply_": False, "div_": True, "divide_": True, "true_divide_": True}
"""Functions that multiply in place; whether they divide."""

CASTS = frozenset(("to", "float", "double", "half", "bfloat16"))
"""Functions that may give the stand-in itself, if it has their dtype."""

MEMORY = frozenset(("untyped_storage", "storage_offset", compat.IS_VIEW, compat.COMPATIBLE))
"""Functions about memory, which are answered for the one element that is there. Code that copies or compiles asks."""

SAME = frozenset(("detach", "detach_", "requires_grad_", "contiguous"))
"""Functions that return the stand-in itself."""


class Owner(Protocol):
    """Has the gradients that stand-ins stand for: the ``FlatGradient`` of one flat."""

    def name_of(self, index: int) -> str:
        """The parameter's name in the model."""

    def ask(self, index: int, question: Question) -> Tensor:
        """The answer for the whole gradient of one parameter, in fp64."""

    def multiply(self, index: int, factor: Factor) -> None:
        """Notes a factor."""

    def zero(self, index: int) -> None:
        """Makes the gradient zero. The gradient is still there."""

    def change(self, index: int, what: str, change: Change) -> None:
        """Changes this rank's part of the gradient."""

    def generation(self, index: int) -> int:
        """A number that is another one after every change of the gradient."""

    def take_if_assigned(self, index: int) -> None:
        """Takes a function of the gradient that the user has assigned to ``parameter.grad``, if there is one."""


Cut = Callable[[Tensor], Tensor]
"""Cuts a tensor of the parameter's shape to this rank's part."""
Change = Callable[[Tensor, Cut], None]
"""Changes this rank's part of a gradient in place."""


@dataclass(frozen=True)
class Subject:
    """What a stand-in stands for: the gradient of one parameter, or an element-wise function of it."""

    owner: weakref.ref[Owner]
    """Weak: a gradient that a user keeps must not keep the model."""
    index: int
    dtype: torch.dtype
    is_empty: bool
    text: str = "the gradient"
    mapping: Elementwise | None = None
    """The function. None: the gradient itself."""
    generation: int = 0
    """Of the gradient, when the function was made from it."""

    def same_gradient(self, other: Subject) -> bool:
        """Whether both are of one gradient, each mapped in its way."""
        return self.owner is other.owner and self.index == other.index


class ShardedGradient(Tensor):
    """Stands for the averaged gradient of one parameter, of which this rank has a part."""

    subject: Subject

    @classmethod
    def make(cls, owner: weakref.ref[Owner], index: int, scalar: Tensor, shape: Sequence[int]) -> ShardedGradient:
        """The stand-in for one parameter's gradient. ``scalar`` is what would be read past torch's functions: NaN."""
        return cls.of(Subject(owner, index, scalar.dtype, 0 in shape), scalar, shape)

    @classmethod
    def of(cls, subject: Subject, scalar: Tensor, shape: Sequence[int]) -> ShardedGradient:
        """A stand-in of some shape, with the dtype and the device of ``scalar``."""
        with compat.plain():
            made = scalar.expand(tuple(shape)).as_subclass(cls)
        made.subject = subject
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        owner, subject = self.subject.owner(), self.subject
        name = "of a model that is gone" if owner is None else f"of {owner.name_of(subject.index)!r}"
        what = "" if subject.mapping is None else f"{subject.text}; "
        facts = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r}"
        return f"ShardedGradient({name}; {what}{facts})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # The wrapper that keeps torch.compile out costs more than the answer, so it is used only where it is needed.
        answer = _answer_untraced if torch.compiler.is_compiling() else _answer
        return answer(func, args, kwargs or {})

    @property
    def owner(self) -> Owner:
        """The flat's gradients. Raises if the model is gone."""
        owner = self.subject.owner()
        if owner is None:
            raise RuntimeError("this is the gradient of a sharded model that is gone, and its values with it")
        return owner

    def check_current(self) -> None:
        """Raises if this is a function of a gradient that has changed since. In torch it would have the old values."""
        subject = self.subject
        if subject.mapping is not None and subject.generation != self.owner.generation(subject.index):
            raise RuntimeError(
                f"the gradient of {self.owner.name_of(subject.index)!r} has changed since {subject.text} was made from "
                f"it, and its old values are gone; make {subject.text} again, after the change"
            )

    def become_gradient(self) -> None:
        """Called when this function of a gradient was assigned: from now on it stands for the gradient itself."""
        subject = self.subject
        self.subject = Subject(subject.owner, subject.index, subject.dtype, subject.is_empty)

    def stands_for(self, owner: Owner, index: int) -> bool:
        """Whether this stands for the gradient of one parameter, or for a function of it."""
        return self.subject.owner() is owner and self.subject.index == index

    def mapped(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedGradient:
        """The stand-in for an element-wise function of this. The other stand-ins are of the same gradient."""

        def mapping(values: Tensor) -> Tensor:
            def value_of(tensor: Tensor) -> Tensor:
                if not isinstance(tensor, ShardedGradient):
                    return tensor
                return values if (inner := tensor.subject.mapping) is None else inner(values)

            return func(*map_tensors(value_of, args), **map_tensors(value_of, kwargs))  # type: ignore[no-any-return]

        subject = self.subject
        dtype = mapping(torch.empty(0, dtype=subject.dtype, device="cpu")).dtype
        if name in CASTS and dtype is subject.dtype:
            return self
        text = f"{name}({', '.join(_text_of(a) for a in (*args, *kwargs.items()))})"
        generation = self.owner.generation(subject.index)
        made = replace(subject, dtype=dtype, text=text, mapping=mapping, generation=generation)
        return self.of(made, torch.zeros((), dtype=dtype, device=self.device), self.shape)

    def refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what} needs the whole gradient of {self.owner.name_of(self.subject.index)!r}, and each rank has a part "
            f"of it; {REMEDY}"
        )


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute(func, name, args)
    if name not in FACTS:
        _check_functions(args, kwargs)
    for tensor in tensors_in(kwargs.get("out")):
        if isinstance(tensor, ShardedGradient):
            tensor.refuse(f"{name}(out=...)")
    if name.startswith("_foreach_"):
        return _for_each(name.removeprefix("_foreach_"), args, kwargs)
    if name == compat.UNSCALE:
        return _unscale(func, *args, **kwargs)
    first = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(first, ShardedGradient):
        standing = next(tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, ShardedGradient))
        if name in ELEMENTWISE and _are_of(standing, args[1:], kwargs) and not isinstance(first, Tensor):
            return standing.mapped(name, func, args, kwargs)
        standing.refuse(f"{name}()")
    if name == "__format__":
        return repr(first)
    if name in SAME:
        return first
    if name in FACTS or name in MEMORY or (name == "type" and len(args) == 1):
        with compat.plain():
            return func(*args, **kwargs)
    if name in LIKE or name in STRIDES:
        empty = torch.empty(first.shape, dtype=first.dtype, device="meta")
        given = {"device": first.device, "dtype": first.dtype, **kwargs} if name in LIKE else kwargs
        return func(empty, *args[1:], **given)
    if name == "zero_" or name in IN_PLACE:
        return _change(first, name, func, args[1:], kwargs)
    if name in ELEMENTWISE and _are_of(first, args[1:], kwargs) and _stays(first, args[1:], kwargs):
        return first.mapped(name, func, args, kwargs)
    return _reduce(first, func, args[1:], kwargs)


def _check_functions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Looks at the stand-ins for functions of gradients: is one assigned to ``parameter.grad``, is one out of date."""
    for tensor in tensors_in((args, kwargs)):
        if isinstance(tensor, ShardedGradient) and tensor.subject.mapping is not None:
            tensor.owner.take_if_assigned(tensor.subject.index)
            tensor.check_current()


_answer_untraced = compat_compile.untraced(_answer)


def _attribute(func: Any, access: str, args: tuple[Any, ...]) -> Any:
    gradient, attribute = args[0], func.__self__.__name__
    if access == "__get__" and attribute == "data":
        return gradient
    if access == "__get__" and attribute in ("T", "mT", "H", "mH", "real", "imag"):
        gradient.refuse(f".{attribute}")
    if access == "__set__" and attribute == "data":
        if args[1] is not gradient:  # a conversion that changes nothing assigns the same
            gradient.copy_(args[1])
        return None
    with compat.plain():
        return func(*args)


def _are_of(gradient: ShardedGradient, args: Any, kwargs: Any) -> bool:
    """Whether all tensors among the arguments stand for the same gradient."""
    return all(
        isinstance(t, ShardedGradient) and t.subject.same_gradient(gradient.subject) for t in tensors_in((args, kwargs))
    )


def _stays(gradient: ShardedGradient, args: Any, kwargs: Any) -> bool:
    """Whether a function such as ``to`` leaves the gradient on its device."""
    devices = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.device | str)]
    wanted = [torch.device(device) for device in devices]
    return all(w.type == gradient.device.type and w.index in (None, gradient.device.index) for w in wanted)


def _reduce(gradient: ShardedGradient, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    subject = gradient.subject
    reading = parse(func.__name__, subject.dtype, args, kwargs)
    if reading is None:
        gradient.refuse(f"{func.__name__}()")
    if subject.is_empty:  # no rank has a part of it
        answer: Tensor = func(torch.empty(gradient.shape, dtype=subject.dtype, device=gradient.device), *args, **kwargs)
        return answer
    question = Question(f"{reading.statistic.text} of {subject.text}", reading.statistic, subject.mapping)
    number = gradient.owner.ask(subject.index, question)
    if reading.is_mean:
        number = number / gradient.numel()
    return number.to(reading.dtype)


def _change(gradient: ShardedGradient, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    owner, subject = gradient.owner, gradient.subject
    if subject.mapping is not None:
        raise RuntimeError(
            f"{name}() on {subject.text} of {owner.name_of(subject.index)!r} would change no gradient; change "
            "parameter.grad itself"
        )
    if name == "zero_":
        owner.zero(subject.index)
        return gradient
    if name in SCALING and len(args) == 1 and not kwargs and _is_number(args[0]):
        owner.multiply(subject.index, Factor(args[0], divides=SCALING[name]))
        return gradient
    shape = gradient.shape
    for tensor in tensors_in((args, kwargs)):
        if isinstance(tensor, ShardedGradient) and not tensor.subject.same_gradient(subject):
            gradient.refuse(f"{name}()")

    def change(part: Tensor, cut: Cut) -> None:
        def part_of(tensor: Tensor) -> Tensor:
            if isinstance(tensor, ShardedGradient):
                return part.clone() if (mapping := tensor.subject.mapping) is None else mapping(part)
            if tensor.dim() == 0:
                return tensor.to(part.device)
            return cut(tensor if tensor.shape == shape else tensor.expand(shape)).to(part.device)

        func(part, *map_tensors(part_of, args), **map_tensors(part_of, kwargs))

    owner.change(subject.index, f"{name}()", change)
    return gradient


def _is_number(value: Any) -> bool:
    if isinstance(value, ShardedGradient):
        return False
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1 and value.dim() <= 1)


def _for_each(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function for many tensors, one after the other. Some may be ordinary tensors."""
    tensors = args[0]
    if name == "norm":
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        return tuple(torch.linalg.vector_norm(tensor, order, dtype=kwargs.get("dtype")) for tensor in tensors)
    function = getattr(Tensor, name, None)
    if function is None:
        next(tensor for tensor in tensors_in(args) if isinstance(tensor, ShardedGradient)).refuse(f"_foreach_{name}()")
    results = []
    for place, tensor in enumerate(tensors):
        mine = [value[place] if isinstance(value, list | tuple) else value for value in args[1:]]
        results.append(function(tensor, *mine, **kwargs))
    return None if name.endswith("_") else results


def _unscale(func: Any, gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """The scaler's unscaling: multiplies gradients, and notes whether one was not finite, the same on all ranks."""
    standing = [gradient for gradient in gradients if isinstance(gradient, ShardedGradient)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, ShardedGradient)]
    if whole:
        func(whole, found_inf, inv_scale)
    if standing:
        finite = torch.stack([gradient.owner.ask(gradient.subject.index, FINITE) for gradient in standing]).amin()
        found_inf.copy_(torch.maximum(found_inf, (1.0 - finite).to(found_inf.device, found_inf.dtype)))
    for gradient in standing:
        gradient.mul_(inv_scale)


def _text_of(argument: Any) -> str:
    if isinstance(argument, ShardedGradient):
        return argument.subject.text
    if isinstance(argument, tuple):
        return f"{argument[0]}={_text_of(argument[1])}"
    return str(argument)
