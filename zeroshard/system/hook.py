"""Callables that are attached to a model. They are not traced by ``torch.compile``, and they refuse to be copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import compat_compile


class NotCopyable:
    """A part of a sharded model, which cannot be copied: this rank does not have all of its parameters."""

    def __deepcopy__(self, memo: object) -> NotCopyable:
        raise _refusal()

    def __reduce_ex__(self, protocol: object) -> Any:
        raise _refusal()


class Hook(NotCopyable):
    """A function as a hook of a module or tensor. ``torch.compile`` breaks its graph there."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @compat_compile.untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _refusal() -> RuntimeError:
    return RuntimeError(
        "a sharded model cannot be copied or pickled, because a copy would be cut off from the optimizer and from "
        "the other ranks; build a new model and load zeroshard.full_state_dict(model) into it, or copy single "
        "parameters inside `with zeroshard.gathered(model):`"
    )
