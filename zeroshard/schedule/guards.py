"""Guards on what users do to a sharded model besides training it.

``state_dict()`` reads parameters as any other code does (``reads.py``). ``load_state_dict()`` gathers the parameters
that it writes to, and each rank takes its part. ``.to()`` either changes nothing, or raises and names the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..shown.absent import Use
from ..states.flat import Flat
from ..states.unit import Unit
from ..system import compat
from ..system.hook import Hook
from .reads import LOADING

_random = torch.Generator("cpu")
"""For values that no other memory has by chance. The user's random numbers stay as they are."""


class Guards:
    """Guards ``state_dict``, ``load_state_dict`` and conversions (``.to()``, ``.half()``, ...) of every module."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], device: torch.device, finish_updates: Callable[[], None]
    ) -> None:
        self._finish_updates = finish_updates
        self._unit_of = {flat: unit for unit in units for flat in unit.flats}
        flat_of = {id(p): flat for flat in self._unit_of for p in flat.parameters}
        for name, module in model.named_modules():
            flats = list(dict.fromkeys(flat_of[id(p)] for p in module.parameters(recurse=False)))
            if flats:
                module.register_state_dict_pre_hook(Hook(partial(_before_state_dict, flats)))
                module.register_load_state_dict_pre_hook(Hook(partial(self._before_load, flats)))
                module.register_load_state_dict_post_hook(Hook(partial(_after_load, flats)))
            dtypes = {p.dtype for p in module.parameters()}
            convert = _conversion(module, name or type(module).__name__, device, dtypes)
            compat.replace_conversion(module, convert)

    def _before_load(
        self, flats: list[Flat], module: nn.Module, state_dict: Any, prefix: str, metadata: Any, *_: Any
    ) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise RuntimeError(
                "load_state_dict(assign=True) would cut the parameters off their shards; leave assign out"
            )
        for flat in flats:
            if flat.home.held:
                self._finish_updates()  # else a delayed update would overwrite the loaded values
            if not self._unit_of[flat].open_blocks:
                if flat.sharded and flat.reader is not None:
                    flat.reader.bring(Use(LOADING, (flat,), (flat.layout.slots[0].name,), frozenset()))
                flat.writes.begin_load()


def _before_state_dict(flats: list[Flat], module: nn.Module, prefix: str, keep_vars: bool) -> None:
    for flat in flats:
        if flat.present:
            flat.lend()  # else a release would empty the caller's views


def _after_load(flats: list[Flat], module: nn.Module, incompatible_keys: Any) -> None:
    for flat in flats:
        flat.writes.end_load()


def _conversion(
    module: nn.Module, name: str, device: torch.device, dtypes: set[torch.dtype]
) -> Callable[..., nn.Module]:
    """A conversion of a sharded module. Parameters and gradients stay as they are, so they need not be here."""

    def convert(function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        effects = {_effect(function, dtype, device) for dtype in dtypes}
        if Effect.CHANGE in effects:
            raise RuntimeError(
                f"{name!r} is sharded, so .to(), .half(), .cuda() and the like cannot convert it; convert before "
                "zeroshard.shard(), or use precision= and device="
            )
        if Effect.COPY not in effects:  # buffers need no copy either
            for part in module.modules() if recurse else [module]:
                compat.convert_buffers(part, function)
        return module

    return Hook(convert)


class Effect(Enum):
    """What a conversion does to a tensor that is on the model's device."""

    NONE = auto()
    COPY = auto()
    """Makes an equal tensor. For example, torch copies in ``.to("cpu:0")``, but not in ``.to("cpu")``."""
    CHANGE = auto()


def _effect(function: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> Effect:
    """What a conversion does to parameters. The conversion is tried on small tensors."""
    effect = Effect.NONE
    for dimensions in (1, 4, 5):  # memory formats exist for four and five dimensions only
        probe = torch.rand([2] * dimensions, generator=_random, device="cpu").to(device, dtype)
        shared, strides = probe.is_shared(), probe.stride()
        result = function(probe)
        facts = (result.dtype, result.device, result.stride(), result.is_shared())
        if facts != (dtype, probe.device, strides, shared) or probe.is_shared() != shared:
            return Effect.CHANGE
        if result is not probe:
            if compat.is_fake(probe) or not torch.equal(result, probe):  # memory without values, as of to_empty()
                return Effect.CHANGE
            effect = Effect.COPY
    return effect
