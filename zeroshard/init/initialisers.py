"""Which initialisers a model on the meta device has, and the order in which they would run on the unsharded model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from torch import nn

from ..config.options import Config


class Step(NamedTuple):
    """One turn of the loop."""

    module: nn.Module
    initialise: Callable[[], object] | None
    """None: the module has no initialiser, nor has any module around it."""


def steps_of(model: nn.Module, config: Config) -> list[Step]:
    """The turns of the loop, with ``init=`` or with the modules' own initialisers."""
    if callable(config.init):
        return [Step(module, partial(config.init, module)) for module in model.modules()]
    return list(_visit(model, None, False, set()))


def _visit(
    module: nn.Module, of_model: Callable[[nn.Module], object] | None, covered: bool, seen: set[nn.Module]
) -> Iterator[Step]:
    """The modules below and including one; ``of_model`` is the ``_init_weights`` of the model around them."""
    if module in seen:
        return
    seen.add(module)
    of_model = _init_weights_of(module) or of_model
    own = getattr(module, "reset_parameters", None)
    if of_model is None and callable(own):
        yield Step(module, own)
    # torch's attention has only this, runs it when its children exist, and means to have the last word on them.
    late = (
        getattr(module, "_reset_parameters", None) if next(module.parameters(recurse=False), None) is not None else None
    )
    for child in module.children():
        yield from _visit(child, of_model, covered or of_model is not None or callable(own) or callable(late), seen)
    if of_model is not None:
        yield Step(module, partial(of_model, module))
    elif not callable(own):
        yield Step(module, late if callable(late) else (_nothing if covered else None))


def _nothing() -> None:
    """A module around this one has an initialiser, which may set its parameters: those of a ParameterList, say."""


def _init_weights_of(module: nn.Module) -> Callable[[nn.Module], object] | None:
    """A model's way to initialise any one of its modules. Others call a method without arguments by that name."""
    method = getattr(module, "_init_weights", None)
    if not callable(method):
        return None
    try:
        inspect.signature(method).bind(module)
    except TypeError:
        return None
    found: Callable[[nn.Module], object] = method
    return found


def certainly_unset(step: Step, names: dict[nn.Module, str]) -> list[tuple[str, str]]:
    """Module and name of tensors that nobody will set, known before anything runs."""
    if step.initialise is not None:
        return []
    own = [*step.module.named_parameters(recurse=False), *step.module.named_buffers(recurse=False)]
    return [(names[step.module], name) for name, tensor in own if tensor.is_meta]


def call(initialise: Callable[[], object], name: str) -> None:
    """Runs an initialiser; what it raises says for which module."""
    try:
        initialise()
    except Exception as error:
        error.add_note(f"while zeroshard initialised module {name or '(root)'!r}, which was on the meta device")
        raise
