"""``ZeroshardFabricStrategy``, for ``lightning.Fabric``."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
from torch import nn

from ...api import full_state_dict
from ...optim.optimizer import ShardedOptimizer
from ...runtime import is_sharded
from ...storage.load import load, read_extra
from ...storage.save import save
from ..accumulation import accumulating
from .sharding import Sharding, folder, packed, refuse, register, unpacked


class ZeroshardFabricStrategy(Sharding, DDPStrategy):
    """A strategy for ``lightning.Fabric`` that shards models."""

    _plugin_name = "precision"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._backward_sync_control = _SyncControl()

    @property
    def precision(self) -> Any:
        return super().precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        self._precision = self._sharding_plugin(plugin)

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Any], scheduler: Any = None) -> Any:
        if len(optimizers) > 1:
            raise ValueError(
                f"setup() was given {len(optimizers)} optimizers; a sharded model has one, which may have several "
                "parameter groups"
            )
        return module, [self._shard(module, optimizers[0], self.precision, self.root_device)], scheduler

    def setup_module(self, module: nn.Module) -> Any:
        """Shards a frozen model."""
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError(
                f"{type(module).__name__} was set up without its optimizer; give both to one call, "
                "fabric.setup(model, optimizer), or freeze the model with requires_grad_(False)"
            )
        if next(module.parameters(), None) is not None:
            self._shard(module, None, self.precision, self.root_device)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> NoReturn:
        raise ValueError("sharding needs the model and its optimizer in one call: fabric.setup(model, optimizer)")

    def module_to_device(self, module: nn.Module) -> None:
        """Moves what has no parameters. ``shard()`` brings each rank its part of a model."""
        if next(module.parameters(), None) is None:
            module.to(self.root_device)

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """With ``empty_init=True`` the model is built on the meta device, and gets its first values when sharded."""
        stack = ExitStack()
        stack.enter_context(torch.device("meta") if empty_init else nullcontext())
        stack.enter_context(self.precision.module_init_context())
        return stack

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002
    ) -> None:
        """Saves a folder with the sharded model of ``state``, its optimizer and everything else. Collective."""
        model, optimizer, others = _parted(state)
        if model is None:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        refuse(storage_options=storage_options, filter=filter)
        extra = packed(self._convert_stateful_objects_in_state(others, filter={}))
        save(folder(self.broadcast(path)), model, optimizer, extra=extra)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> Any:
        if not Path(path).is_dir():
            return super().load_checkpoint(path, state, strict, weights_only)
        if not state:
            return unpacked(read_extra(path), weights_only)
        model, optimizer, others = _parted(state if isinstance(state, dict) else {"": state})
        if model is None:
            raise ValueError(f"{path} has a sharded model; give it in state=")
        found = unpacked(load(folder(self.broadcast(path)), model, optimizer), weights_only)
        missing = [name for name in others if name not in found]
        if strict and missing:
            raise KeyError(f"{path} has no {missing[0]!r}; leave it out of state=, or use strict=False")
        for name in others.keys() & found.keys():
            if hasattr(others[name], "load_state_dict"):
                others[name].load_state_dict(found.pop(name))
            else:
                state[name] = found.pop(name)
        return found

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return full_state_dict(module) if is_sharded(module) else super().get_module_state_dict(module)


class _SyncControl(BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return accumulating(module) if enabled else nullcontext()


def _parted(state: dict[str, Any]) -> tuple[nn.Module | None, ShardedOptimizer | None, dict[str, Any]]:
    """The sharded model of a state, its optimizer if that is there too, and everything else."""
    models = [each for each in state.values() if isinstance(each, nn.Module) and is_sharded(each)]
    if len(models) > 1:
        raise ValueError("a checkpoint has one sharded model; save each to a folder of its own")
    optimizers = [each for each in state.values() if isinstance(each, ShardedOptimizer)]
    others = {name: each for name, each in state.items() if not any(each is one for one in (*models, *optimizers))}
    return next(iter(models), None), next(iter(optimizers), None), others


register(STRATEGY_REGISTRY, ZeroshardFabricStrategy)
