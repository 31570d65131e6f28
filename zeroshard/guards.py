"""What people do to a model besides training it: each is right on a sharded model, or raises and says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import compat
from .runtime import Runtime
from .unit import Flat, Presence


def install(runtime: Runtime) -> None:
    """Guards ``state_dict``, ``load_state_dict`` and conversions (``.to()``, ``.half()``, ...) on every module."""
    flat_of = {id(p): flat for unit in runtime.units for flat in unit.flats for p in flat.parameters}
    device = runtime.fabric.device
    for name, module in runtime.model.named_modules():
        flats = list(dict.fromkeys(flat_of[id(p)] for p in module.parameters(recurse=False)))
        if flats:
            module.register_state_dict_pre_hook(partial(_before_state_dict, runtime, flats))
            module.register_load_state_dict_pre_hook(partial(_before_load, flats))
            module.register_load_state_dict_post_hook(partial(_after_load, flats))
        dtypes = {p.dtype for p in module.parameters()}
        compat.guard_conversion(
            module,
            partial(_changes_nothing, device, dtypes),
            f"{name or type(module).__name__!r} is sharded, so .to(), .half(), .cuda() and the like cannot convert it; "
            "convert before zeroshard.shard(), or use precision= and device=",
        )


@contextmanager
def names_only(runtime: Runtime) -> Iterator[None]:
    """Inside, ``state_dict(keep_vars=True)`` may be asked which tensor has which name, values or not."""
    runtime.names_only = True
    try:
        yield
    finally:
        runtime.names_only = False


def _before_state_dict(runtime: Runtime, flats: list[Flat], module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if runtime.names_only:
        return
    for flat in flats:
        if flat.presence is Presence.RELEASED:
            raise RuntimeError(
                f"state_dict(): the parameters of {prefix.rstrip('.') or 'the model'!r} are sharded and not here; "
                "call zeroshard.full_state_dict(model), or state_dict() inside `with zeroshard.gathered(model):`"
            )
        flat.wait()


def _before_load(flats: list[Flat], module: nn.Module, state_dict: Any, prefix: str, metadata: Any, *_: Any) -> None:
    if metadata.get("assign_to_params_buffers", False):
        raise RuntimeError("load_state_dict(assign=True) would cut the parameters off their shards; leave assign out")
    for flat in flats:
        if flat.presence is Presence.RELEASED:
            raise RuntimeError(
                f"load_state_dict(): the parameters of {prefix.rstrip('.') or 'the model'!r} are sharded and not here; "
                "load inside `with zeroshard.gathered(model, write=True):`, or before zeroshard.shard()"
            )
        flat.wait()


def _after_load(flats: list[Flat], module: nn.Module, incompatible_keys: Any) -> None:
    with torch.no_grad():
        for flat in flats:
            if not flat.sharded:
                flat.refresh_master()


def _changes_nothing(device: torch.device, dtypes: set[torch.dtype], function: Callable[[Tensor], Tensor]) -> bool:
    """Whether a conversion leaves parameters as they are: tried on empty tensors."""
    for dtype in dtypes:
        probe = torch.empty(0, dtype=dtype, device=device)
        result = function(probe)
        if result.dtype is not dtype or result.device != probe.device or result.is_shared() != (device.type == "cuda"):
            return False
    return True
