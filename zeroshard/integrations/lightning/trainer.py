"""``ZeroshardStrategy``, for ``lightning.Trainer``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn

from ...api import full_state_dict
from ...optim.optimizer import ShardedOptimizer
from ...runtime import is_sharded, runtime_of
from ...storage.load import load
from ...storage.save import save, while_all_wait
from ..accumulation import accumulating
from .sharding import Sharding, folder, packed, refuse, register, unpacked


class ZeroshardStrategyMixin(Sharding):
    """Makes a strategy that shards of a namespace's ``DDPStrategy``. Name it before that class in the list of bases."""

    _plugin_name = "precision_plugin"

    # Of Lightning's strategies:
    accelerator: Any
    broadcast: Any
    checkpoint_io: Any
    cluster_environment: Any
    lightning_module: Any
    model: Any
    optimizers: list[Any]
    root_device: Any
    _layer_sync: Any

    @property
    def precision_plugin(self) -> Any:
        return super().precision_plugin  # type: ignore[misc]

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = self._sharding_plugin(plugin)

    # -- setting up -----------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Shards the module with the optimizer of ``configure_optimizers``. Evaluation alone does so too."""
        self._check(trainer)
        self.accelerator.setup(trainer)
        module = self.lightning_module
        if not is_sharded(module):
            if self._layer_sync:
                self.model = self._layer_sync.apply(self.model)
            self.model = self.precision_plugin.convert_module(self.model)
            self.setup_optimizers(trainer)
            module.to(self.root_device)  # parameters are there: so that self.device is known
        elif trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()  # type: ignore[attr-defined]

    def setup_optimizers(self, trainer: Any) -> None:
        """Shards the module with its optimizer. A module that is sharded trains anew, as with a new optimizer."""
        super().setup_optimizers(trainer)  # type: ignore[misc]
        module = self.lightning_module
        own = {id(parameter) for parameter in module.parameters()}
        found = [each for each in self.optimizers if any(id(p) in own for g in each.param_groups for p in g["params"])]
        if len(found) > 1:
            raise ValueError(
                f"configure_optimizers() returned {len(found)} optimizers; a sharded model has one, which may have "
                "several parameter groups"
            )
        if not found and trainer.state.fn == "fit":
            raise ValueError("configure_optimizers() returned no optimizer of this module's parameters")
        sharded: ShardedOptimizer | None
        if is_sharded(module):
            sharded = _renewed(module, found[0])
        elif found:
            sharded = self._shard(module, found[0], self.precision_plugin, self.root_device)
        else:  # nothing will train it
            sharded = self._shard(module.requires_grad_(False), None, self.precision_plugin, self.root_device)
        self.optimizers = [] if sharded is None else [sharded]

    def _check(self, trainer: Any) -> None:
        """Raises if settings of the Trainer contradict sharding, or its options."""
        if getattr(self.lightning_module, "_compiler_ctx", None) is not None:
            raise ValueError(
                "a sharded model is not compiled as a whole; compile its blocks in configure_model(): "
                "`for block in self.blocks: block.compile()`"
            )
        clips = bool(trainer.gradient_clip_val)
        if clips and self._config.clip_grad_norm is not None:
            raise ValueError("clip_grad_norm= of the strategy and gradient_clip_val= of the Trainer; leave one out")
        in_backward = self._config.offload is not None and self._config.offload.update_in_backward
        if in_backward and (clips or trainer.accumulate_grad_batches > 1):
            raise ValueError(
                "update_in_backward uses each gradient as it comes; leave gradient_clip_val and "
                "accumulate_grad_batches out, or leave it out"
            )

    def model_to_device(self) -> None:
        """Does nothing: the whole model may not fit there, and ``shard()`` brings each rank its part."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """With ``empty_init=True`` the module is built on the meta device, and gets its first values when sharded."""
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    def teardown(self) -> None:
        """The sharded module stays where it is."""
        if is_sharded(self.lightning_module):
            for each in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
                each.teardown()
        else:
            super().teardown()  # type: ignore[misc]

    # -- steps ----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            if not self.lightning_module.automatic_optimization:  # backward runs inside
                return self.lightning_module.training_step(*args, **kwargs)
            return self._through_forward("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._through_forward("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._through_forward("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._through_forward("predict_step", *args, **kwargs)

    def _through_forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a step as the module's forward: there a pass begins, whatever parts of the module the step calls."""
        module = self.lightning_module
        return self._forward_redirection(module, module, name, *args, **kwargs)  # type: ignore[attr-defined]

    def block_backward_sync(self) -> Any:
        return accumulating(self.lightning_module)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty: weights come into a checkpoint when it is saved."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty: each rank saves its part, beside Lightning's dict."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves a folder with everything, or, of weights alone, the file that Lightning saves. Collective."""
        module = self.lightning_module
        if "optimizer_states" in checkpoint:
            refuse(storage_options=storage_options)
            save(folder(self.broadcast(filepath)), module, runtime_of(module).optimizer, extra=packed(checkpoint))
            return
        checkpoint["state_dict"] = full_state_dict(module, rank=0)
        write = partial(super().save_checkpoint, checkpoint, filepath, storage_options)  # type: ignore[misc]
        while_all_wait(runtime_of(module).fabric, write if checkpoint["state_dict"] else None)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a folder of any stage and number of ranks, or a file of Lightning's."""
        if not Path(checkpoint_path).is_dir():
            found: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)  # type: ignore[misc]
            return found
        module, trains = self.lightning_module, self.lightning_module.trainer.state.fn == "fit"
        optimizer = runtime_of(module).optimizer if trains else None
        return unpacked(load(folder(self.broadcast(checkpoint_path)), module, optimizer, random=trains), weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if checkpoint["state_dict"]:  # of a file
            super().load_model_state_dict(checkpoint, strict)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            if state:  # of a file
                optimizer.load_state_dict(state)


def _renewed(module: nn.Module, optimizer: torch.optim.Optimizer) -> ShardedOptimizer:
    """The module's sharded optimizer, without states, and with the settings of an optimizer that was just made."""
    sharded = runtime_of(module).optimizer
    made = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    if (
        sharded is None
        or type(optimizer) is not type(sharded.unsharded)
        or made != [[id(parameter) for parameter in group["params"]] for group in sharded.param_groups]
    ):
        raise ValueError(
            f"this {type(module).__name__} was sharded for another optimizer; build it anew, and go on from a "
            "checkpoint with ckpt_path="
        )
    sharded.load_state_dict(optimizer.state_dict())
    optimizer.param_groups = sharded.param_groups  # schedulers of the new one set what the sharded one reads
    return sharded


class ZeroshardStrategy(ZeroshardStrategyMixin, DDPStrategy):
    """A strategy for ``lightning.Trainer`` that shards the module."""


register(StrategyRegistry, ZeroshardStrategy)
