"""Hugging Face Accelerate: ``ShardedAccelerator``, an ``Accelerator`` whose ``prepare`` shards.

.. code-block:: python

    from zeroshard.integrations.accelerate import ShardedAccelerator

    accelerator = ShardedAccelerator(zeroshard={"stage": 3, "offload": "cpu"})  # and all arguments of Accelerator
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

The loop stays as it is. Data loaders, schedulers, autocast, the gradient scaler and trackers remain Accelerate's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..api import full_state_dict, shard
from ..config.options import Config
from ..optim.optimizer import ShardedOptimizer
from ..runtime import is_sharded, runtime_of
from ..storage.load import load
from ..storage.save import save, together, while_all_wait
from .accumulation import accumulating
from .requirement import require

require("accelerate", "zeroshard.integrations.accelerate", "transformers")  # before what needs it is imported

from accelerate import Accelerator  # type: ignore[import-untyped] # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped] # noqa: E402
from accelerate.utils import DistributedType  # type: ignore[import-untyped] # noqa: E402
from huggingface_hub import save_torch_state_dict  # noqa: E402

from .compiled_blocks import check_compiler, compile_blocks, not_compiled  # noqa: E402

SUPPORTED = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
STATES = "zeroshard"
"""The folder of a checkpoint in which the states of sharded models are. Further models have a number behind it."""
PREPARED = "_is_accelerate_prepared"
"""What Accelerate writes on a model or an optimizer that went through ``prepare``."""
TOGETHER = "sharding needs a model and its optimizer, so give both to one call: prepare(model, optimizer, ...)"


class ShardedAccelerator(Accelerator):  # type: ignore[misc] # accelerate has no types
    """An ``Accelerator`` that shards models instead of replicating them with DistributedDataParallel."""

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, zeroshard: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """``zeroshard``: options of ``zeroshard.shard``. All other arguments are those of ``Accelerator``."""
        check_options(zeroshard)
        super().__init__(*args, **kwargs)
        self.shard_with(zeroshard)

    @classmethod
    def taking_over(cls, accelerator: Accelerator, zeroshard: Mapping[str, Any] | None) -> ShardedAccelerator:
        """An accelerator that another library made, as one that shards. Both have the same state from now on."""
        taken = cls.__new__(cls)
        taken.__dict__ = accelerator.__dict__
        taken.shard_with(zeroshard)
        return taken

    def shard_with(self, options: Mapping[str, Any] | None) -> None:
        """Takes options of ``shard()`` for the models to come. Raises if they do not go with these settings."""
        config = check_options(options)
        self._options = dict(options or {})
        if self.distributed_type not in SUPPORTED or self.parallelism_config is not None:
            other = "a parallelism_config" if self.parallelism_config is not None else f"{self.distributed_type.value}"
            raise ValueError(
                f"zeroshard shards the model, so it excludes {other}; leave that plugin or configuration out, and "
                "start with torchrun, or with `accelerate launch --multi_gpu`"
            )
        started = int(os.environ.get("WORLD_SIZE", 1))
        if self.num_processes != started:
            raise ValueError(
                f"{started} processes were started, and Accelerate counts {self.num_processes}, so each would train on "
                "all data; on CPUs say so with Accelerator(cpu=True), or TrainingArguments(use_cpu=True)"
            )
        check_compiler(self.state.dynamo_plugin)
        if self.mixed_precision == "fp8":
            raise ValueError('mixed_precision="fp8" replaces layers of the model; use "bf16" with zeroshard')
        if config.precision.loss_scale is not None and self.mixed_precision != "no":
            raise ValueError(
                f'precision="fp16" computes in fp16 and scales the loss itself; leave {self.mixed_precision} of '
                "Accelerate or TrainingArguments out, or leave precision out for autocast"
            )

    # -- prepare --------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Shards each model with its optimizer. Frozen models stay whole, on this rank's device."""
        sharded = self._shard(args)
        return super().prepare(*(sharded.get(id(each), each) for each in args), device_placement=device_placement)

    def _shard(self, given: tuple[Any, ...]) -> dict[int, ShardedOptimizer]:
        """Shards the models that are given with an optimizer. Returns what takes the place of which optimizer."""
        models = [each for each in given if isinstance(each, nn.Module) and not is_sharded(each)]
        elsewhere = [m for m in given if isinstance(m, nn.Module) and is_sharded(m) and not hasattr(m, PREPARED)]
        if elsewhere and self._options:
            raise ValueError("the model is sharded already, so zeroshard= has no effect; leave it out")
        wrappers = (ShardedOptimizer, AcceleratedOptimizer)
        optimizers = [e for e in given if isinstance(e, torch.optim.Optimizer) and not isinstance(e, wrappers)]
        found: dict[int, ShardedOptimizer] = {}
        for optimizer in optimizers:
            trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            model = next((m for m in models if any(id(p) in trained for p in m.parameters())), None)
            if model is None:
                raise ValueError(f"prepare() was given an optimizer without its model; {TOGETHER}")
            _, found[id(optimizer)] = shard(model, optimizer, **{**self._options, "device": self.device})
        return found

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Adds autocast, and compiles blocks. A sharded model is at its place, and averages its gradients itself."""
        if is_sharded(model):
            plugin = self.state.dynamo_plugin
            if not hasattr(model, PREPARED):
                compile_blocks(model, plugin)
            with not_compiled(plugin):
                sharded: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
            return sharded
        if not evaluation_mode and any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                f"prepare() was given {type(model).__name__} without its optimizer; {TOGETHER}. A model that is not "
                "trained is frozen, or prepared with prepare_model(model, evaluation_mode=True)"
            )
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        if not isinstance(optimizer, ShardedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        prepared = PreparedOptimizer(optimizer, device_placement=False, scaler=self.scaler)
        self._optimizers.append(prepared)
        return prepared

    # -- the loop -------------------------------------------------------------------------------------------------

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Micro-batches inside reduce nothing, where a rank has whole gradients anyway (stages 0 and 1)."""
        return accumulating(model)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> NoReturn:
        raise RuntimeError(
            "join_uneven_inputs is for DistributedDataParallel: ranks of a sharded model make the same number of "
            "steps; leave even_batches=True, or drop_last=True in the data loader"
        )

    # -- saving ---------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The whole state dict, on the CPU of the main process. The others get an empty one. Collective."""
        if not is_sharded(model):
            found: dict[str, Tensor] = super().get_state_dict(model, unwrap=unwrap)
            return found
        everywhere = self.project_configuration.save_on_each_node
        return full_state_dict(model, rank=None if everywhere else 0)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Saves sharded models and optimizers with ``zeroshard.save``, and everything else as Accelerate does."""
        _refuse(kwargs)
        step = self.step
        with self._without_sharded() as models:
            location = super().save_state(output_dir, safe_serialization=safe_serialization)
        for number, model in enumerate(models):
            save(_states(location, number), model, runtime_of(model).optimizer, extra={"step": step})
        return location

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Goes on from ``save_state``, on any number of ranks and in any stage."""
        _refuse(kwargs)
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            folders = Path(self.project_dir, "checkpoints").iterdir()
            input_dir = str(max(folders, key=lambda folder: int(re.findall(r"\d+", folder.name)[-1])))
        with self._without_sharded() as models:
            super().load_state(input_dir, load_kwargs=load_kwargs)
        assert input_dir is not None, "refused by Accelerate"
        for number, model in enumerate(models):
            extra = load(_states(os.path.expanduser(input_dir), number), model, runtime_of(model).optimizer)
            self.step = extra["step"]

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """As Accelerate. An error of the main process is raised on all ranks. Collective."""
        if not is_sharded(model):
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        state = self.get_state_dict(model)

        def write() -> None:
            os.makedirs(save_directory, exist_ok=True)
            save_torch_state_dict(
                state, Path(save_directory), max_shard_size=max_shard_size, safe_serialization=safe_serialization
            )

        while_all_wait(runtime_of(model).fabric, write if state else None)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> NoReturn:
        raise RuntimeError(
            "a hook before save_state() is given whole weights, and there are none: each rank saves its shards; write "
            "what you need beside save_state(), or register an object with register_for_checkpointing()"
        )

    register_load_state_pre_hook = register_save_state_pre_hook

    @contextmanager
    def _without_sharded(self) -> Iterator[list[nn.Module]]:
        """Inside, Accelerate does not know of sharded models and their optimizers. All ranks end, or all raise."""
        models, optimizers = self._models, self._optimizers
        sharded = [model for model in models if is_sharded(model)]
        self._models = [model for model in models if not is_sharded(model)]
        self._optimizers = [optimizer for optimizer in optimizers if not isinstance(optimizer, PreparedOptimizer)]
        try:
            with together(runtime_of(sharded[0]).fabric) if sharded else nullcontext():
                yield sharded
        finally:
            self._models, self._optimizers = models, optimizers


class PreparedOptimizer(AcceleratedOptimizer):  # type: ignore[misc] # accelerate has no types
    """A sharded optimizer as Accelerate steps it: only when gradients are complete, and with its scaler."""

    _is_accelerate_prepared = True

    def step(self, closure: Any = None) -> None:
        before = self.optimizer.skipped_steps
        super().step(closure)
        if self.scaler is None:
            self._is_overflow = self.optimizer.skipped_steps > before  # the scheduler then does not step


def check_options(options: Mapping[str, Any] | None) -> Config:
    """Raises if these are no options of ``shard()``, or none that go with Accelerate."""
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f'zeroshard={options!r} must be a dict of options, such as {{"stage": 3, "offload": "cpu"}}')
    if "device" in (options or {}):
        raise ValueError("Accelerate chooses the device of each rank; leave device= out of zeroshard=")
    return Config.parse(dict(options or {}))


def _refuse(arguments: Mapping[str, Any]) -> None:
    if arguments:
        raise TypeError(f"{next(iter(arguments))}= is for other kinds of models; a sharded one is saved by shards")


def _states(folder: str | os.PathLike[str], number: int) -> Path:
    return Path(folder, STATES if number == 0 else f"{STATES}_{number}")
