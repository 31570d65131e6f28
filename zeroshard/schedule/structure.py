"""Notices that the set of a sharded model's parameters has changed, and refuses that by name.

A parameter that comes after ``shard()`` is in no unit and no optimizer. torch tells of every module and parameter that
is registered anywhere in the process. If the module that it is registered on belongs to a sharded model, the model's
parameters are compared before the next forward or step. Other changes are allowed: parameters that are gone are simply
not used any more, and ``torch.compile`` puts a wrapper around the same parameters.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList

from ..states.unit import Unit
from ..system import compat

_structure_of: dict[int, weakref.ref[Structure]] = {}
"""The structure that a module belongs to, by the module's identity. An identity that is used again does no harm."""
_structures: weakref.WeakSet[Structure] = weakref.WeakSet()
_hooks: list[object] = []

REMEDY = "change the model before zeroshard.shard()"


class Structure:
    """The parameters and modules that one model had when it was sharded."""

    def __init__(self, model: nn.Module, units: Iterable[Unit]) -> None:
        self._model = model
        self._names = {
            id(parameter): slot.name
            for unit in units
            for flat in unit.flats
            for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True)
        }
        self._owners = [
            (name or type(module).__name__, module)
            for name, module in model.named_modules()
            if next(module.parameters(recurse=False), None) is not None
        ]
        """Modules that have parameters themselves. FSDP takes the parameters away before it can be seen."""
        self._parametrized = {id(module) for module in model.modules() if isinstance(module, ParametrizationList)}
        self._outlined = [unit.module for unit in units]
        self.changed = False
        """Something was registered on a module since the last look."""
        self._know_modules()
        _structures.add(self)
        if not _hooks:
            _hooks.append(register_module_module_registration_hook(_after_module))
            _hooks.append(register_module_parameter_registration_hook(_after_parameter))

    def _know_modules(self) -> None:
        """Notes all modules that the model has now, so that later changes of them are seen."""
        modules = list(self._model.modules())
        identities = [id(module) for module in modules]
        _structure_of.update(dict.fromkeys(identities, weakref.ref(self)))
        weakref.finalize(self, _forget, identities)
        # torch does not tell of ModuleList.insert(), nor of fully_shard(), which changes a module's class.
        lists = [module for module in modules if isinstance(module, nn.ModuleList | nn.Sequential)]
        self._outlined = list(dict.fromkeys([*self._outlined, *lists]))
        self._outline = compat.outline(self._outlined)

    def check(self) -> bool:
        """Raises if a parameter was added or replaced. Returns whether anything was registered, else at little cost."""
        if not self.changed and compat.outline(self._outlined) == self._outline:
            return False
        self.changed = True
        self._compare()
        return True

    def name_in(self, module: nn.Module) -> str | None:
        """The name of a sharded module with parameters that is in this module, if there is any."""
        inside = {id(part) for part in module.modules()}
        return next((name for name, owner in self._owners if id(owner) in inside), None)

    def _compare(self) -> None:
        for name, module in self._model.named_modules():
            wrapper = parallel_wrapper(module)
            if wrapper is not None:
                what = repr(name) if name else "the model"
                raise RuntimeError(f"{what} was given to {wrapper} after zeroshard.shard(); {leave(wrapper)}")
            if isinstance(module, ParametrizationList) and id(module) not in self._parametrized:
                raise RuntimeError(
                    f"{name!r}: a parametrisation was registered on a sharded model, and its parameters are in no unit "
                    f"and no optimizer; {REMEDY}"
                )
        names, borrowed = set(self._names.values()), False
        for name, parameter in self._model.named_parameters():
            if not isinstance(parameter, nn.Parameter):
                borrowed = True  # torch.func.functional_call has put another tensor in its place, until it returns
            elif id(parameter) not in self._names:
                verb = "replaced" if name in names else "added"
                raise RuntimeError(
                    f"parameter {name!r} was {verb} after zeroshard.shard(), so it is in no unit and no optimizer; "
                    f"{REMEDY}"
                )
        if not borrowed:
            self._know_modules()
            self.changed = False


def parallel_wrapper(module: nn.Module) -> str | None:
    """The name of torch's class or function that has made a module data-parallel in its own way, if any has."""
    for kind in (DistributedDataParallel, DataParallel):
        if isinstance(module, kind):
            return kind.__name__
    fsdp = sys.modules.get("torch.distributed.fsdp")  # the import takes time; without it, nobody has used the classes
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        return "FullyShardedDataParallel"
    return "fully_shard" if fsdp is not None and isinstance(module, fsdp.FSDPModule) else None


def leave(wrapper: str) -> str:
    """The remedy for a wrapper of torch that makes a model data-parallel."""
    remedy = f"leave {wrapper} out: shard() averages the gradients"
    if wrapper == DistributedDataParallel.__name__:
        remedy += (
            ". Hugging Face's libraries put it around the model: use ShardedAccelerator of "
            "zeroshard.integrations.accelerate, or ShardedTrainer of zeroshard.integrations.transformers"
        )
    return remedy


def _forget(identities: list[int]) -> None:
    for identity in identities:
        if _structure_of.get(identity, _nobody)() is None:
            _structure_of.pop(identity, None)


def _after_module(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    wrapper = parallel_wrapper(parent)
    if wrapper is not None and child is not None:
        for structure in list(_structures):
            found = structure.name_in(child)
            if found is not None:
                raise RuntimeError(f"{wrapper} was put around a sharded model, which has {found!r}; {leave(wrapper)}")
    _note(parent)


def _after_parameter(module: nn.Module, name: str, parameter: Any) -> None:
    _note(module)


def _note(module: nn.Module) -> None:
    structure = _structure_of.get(id(module), _nobody)()
    if structure is not None:
        structure.changed = True


def _nobody() -> None:
    return None
