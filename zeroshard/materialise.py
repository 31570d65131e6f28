"""The first values: a unit's parameters move from wherever they are into its flats, one unit at a time.

A model on the meta device has no values yet. Its modules are initialised in the order of ``modules()``, as the loop
``for m in model.modules(): m.reset_parameters()`` would on the unsharded model, so the same seed gives the same
weights in every stage and world; at no time is more than the root unit and one other whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .comm import Fabric
from .unit import Flat, Unit

Initialiser = Callable[[nn.Module], None]


def adopt_values(model: nn.Module, units: list[Unit], fabric: Fabric) -> None:
    """Fills every flat with rank 0's parameters, and takes rank 0's buffers."""
    if any(parameter.is_meta for parameter in model.parameters()):
        _initialise_on_meta(model, units, fabric)
    else:
        for unit in units:
            for flat in unit.flats:
                _adopt(flat)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(fabric.device)
        fabric.broadcast(buffer.data)


def _adopt(flat: Flat) -> None:
    origin = flat.new_origin()
    for view, parameter in zip(flat.views_of(origin), flat.parameters, strict=True):
        view.copy_(parameter.data)
        parameter.data = view  # the old memory is given back now, not when the whole model has moved
    flat.adopt(origin)


def _initialise_on_meta(model: nn.Module, units: list[Unit], fabric: Fabric) -> None:
    owners = {id(p): unit for unit in units for flat in unit.flats for p in flat.parameters}
    own = {
        module: list(module.parameters(recurse=False))
        for module in model.modules()
        if any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))
    }
    initialisers = {
        module: _initialiser(model, name, module) for name, module in model.named_modules() if module in own
    }
    unfinished = {unit: {module for module in own if any(owners[id(p)] is unit for p in own[module])} for unit in units}
    origins: dict[Flat, Tensor] = {}
    for module, initialise in initialisers.items():
        for unit in {owners[id(p)]: None for p in own[module]}:
            if not any(flat in origins for flat in unit.flats) and unfinished[unit]:
                for flat in unit.flats:
                    origins[flat] = flat.new_origin()
                    _fill_with(flat, origins[flat])
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=fabric.device))
        initialise(module)
        for unit in {owners[id(p)]: None for p in own[module]}:
            unfinished[unit].discard(module)
            if not unfinished[unit]:
                for flat in unit.flats:
                    flat.adopt(origins.pop(flat))


def _fill_with(flat: Flat, origin: Tensor) -> None:
    """Gives meta parameters memory without making new objects: the optimizer and the user hold the old ones."""
    for view, parameter in zip(flat.views_of(origin), flat.parameters, strict=True):
        with torch.no_grad():
            real = nn.Parameter(view.data, requires_grad=parameter.requires_grad)  # .data: a version of its own
        torch.utils.swap_tensors(parameter, real)


def _initialiser(model: nn.Module, name: str, module: nn.Module) -> Initialiser:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        return lambda _: reset()
    of_hugging_face = getattr(model, "_init_weights", None)
    if callable(of_hugging_face):
        return lambda _: of_hugging_face(module)
    raise ValueError(
        f"module {name or '(root)'!r} ({type(module).__name__}) is on the meta device and has no initialiser; give it "
        "a reset_parameters() method, or build the model on the CPU"
    )
