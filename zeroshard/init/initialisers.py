"""The initialisers of a model on the meta device, in the order in which they would run on the unsharded model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from torch import nn

from ..config.options import Config


class Visit(NamedTuple):
    """One module of the loop over ``modules()``, with its initialiser."""

    module: nn.Module
    initialise: Callable[[], object] | None
    """None: neither the module nor a module around it has an initialiser."""


def visits_of(model: nn.Module, config: Config) -> list[Visit]:
    """The visits of the loop, with ``init=`` or with the modules' own initialisers."""
    if callable(config.init):
        return [Visit(module, partial(config.init, module)) for module in model.modules()]
    return list(_visits_in(model, None, False, set()))


def _visits_in(
    module: nn.Module, of_model: Callable[[nn.Module], object] | None, covered: bool, seen: set[nn.Module]
) -> Iterator[Visit]:
    """The visits of a module and of the modules inside it.

    ``of_model`` is the ``_init_weights`` of the model around them. ``covered`` is whether a module around them has an
    initialiser.
    """
    if module in seen:
        return
    seen.add(module)
    of_model = _init_weights_of(module) or of_model
    own = getattr(module, "reset_parameters", None)
    if of_model is None and callable(own):
        yield Visit(module, own)
    # torch's attention has only `_reset_parameters`, which also sets its children: it runs after them.
    has_parameters = next(module.parameters(recurse=False), None) is not None
    late = getattr(module, "_reset_parameters", None) if has_parameters else None
    for child in module.children():
        yield from _visits_in(child, of_model, covered or of_model is not None or callable(own) or callable(late), seen)
    if of_model is not None:
        yield Visit(module, partial(of_model, module))
    elif not callable(own):
        yield Visit(module, late if callable(late) else (_nothing if covered else None))


def _nothing() -> None:
    """For a module whose parameters an initialiser around it may set, such as a ParameterList."""


def _init_weights_of(module: nn.Module) -> Callable[[nn.Module], object] | None:
    """The method with which a Hugging Face model initialises any of its modules.

    Other models have a method of this name that takes no argument. None for these.
    """
    method = getattr(module, "_init_weights", None)
    if not callable(method):
        return None
    try:
        inspect.signature(method).bind(module)
    except TypeError:
        return None
    found: Callable[[nn.Module], object] = method
    return found


def certainly_unset(visit: Visit, prefix: str) -> list[str]:
    """Names of the tensors of a module that no initialiser will set. Known before anything runs."""
    if visit.initialise is not None:
        return []
    parameters = visit.module.named_parameters(prefix, recurse=False)
    buffers = visit.module.named_buffers(prefix, recurse=False)
    return [name for name, tensor in (*parameters, *buffers) if tensor.is_meta]


def call(initialise: Callable[[], object], name: str) -> None:
    """Runs an initialiser. Its exception gets a note that names the module."""
    try:
        initialise()
    except Exception as error:
        error.add_note(f"while zeroshard initialised module {name or '(root)'!r}, which was on the meta device")
        raise
