"""Hugging Face Transformers: ``ShardedTrainer``, a ``Trainer`` that shards, and the mixin for other trainers.

.. code-block:: python

    from zeroshard.integrations.transformers import ShardedTrainer, ShardedTrainerMixin

    trainer = ShardedTrainer(model, args, train_dataset=data, zeroshard={"stage": 3, "offload": "cpu"})

    class ShardedSFTTrainer(ShardedTrainerMixin, SFTTrainer): ...  # TRL's trainers, Seq2SeqTrainer, your own

Start the script with torchrun, one process a device. The model is sharded when its optimizer is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config.options import Config
from ..config.table import Extent
from ..runtime import is_sharded, runtime_of
from ..storage import random_state
from ..storage.load import load
from ..storage.save import save, while_all_wait
from .adapters import saved_state
from .requirement import require

require("transformers", "zeroshard.integrations.transformers", "transformers")

from transformers import Trainer  # noqa: E402 - after the check

from .accelerate import STATES, ShardedAccelerator, check_options  # noqa: E402

SYNCED_GENERATION = "_is_fsdp_managed_module"
"""A mark on a model: ``generate()`` goes on until all ranks are done, because each forward needs all of them."""

EXCLUDED = {
    "fsdp": "zeroshard= takes its place",
    "deepspeed": "zeroshard= takes its place",
    "parallelism_config": "divide the model by tensor parallelism before zeroshard.shard(), in a loop of your own",
    "auto_find_batch_size": "one rank alone would start again; `zeroshard plan MODEL --batch max` finds the batch",
    "enable_jit_checkpoint": "a signal reaches each rank at another step; save every few steps with save_steps",
    "fp16_full_eval": 'a sharded model is not cast; train in 16 bits too, with precision="fp16"',
    "bf16_full_eval": 'a sharded model is not cast; train in 16 bits too, with precision="bf16"',
    "ddp_bucket_cap_mb": "it has no effect: there is no DistributedDataParallel",
    "ddp_broadcast_buffers": "it has no effect: buffers that forward changes follow rank 0",
    "ddp_static_graph": "it has no effect: there is no DistributedDataParallel",
}
"""Fields of ``TrainingArguments`` that do not go with sharding, and what to do instead."""


class ShardedTrainerMixin:
    """Makes any subclass of ``Trainer`` shard its model. Name it before that class in the list of bases."""

    args: Any
    model: Any
    optimizer: Any
    accelerator: Any

    def __init__(self, *args: Any, zeroshard: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """``zeroshard``: options of ``zeroshard.shard``. All other arguments are those of the trainer."""
        check_options(zeroshard)
        self._options = dict(zeroshard or {})
        self._random_state: dict[str, Any] | None = None
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        config = check_options(self._options)
        mistakes = list(_mistakes(self.args, config))
        if mistakes:
            raise ValueError("; ".join(mistakes))
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator = ShardedAccelerator.taking_over(self.accelerator, self._options)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing: the whole model may not fit there, and ``shard()`` brings each rank its part."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the optimizer, and shards the model with it. The scheduler is made afterwards."""
        if not is_sharded(self.model):
            super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        if runtime_of(self.model).table.parameters.extent is Extent.SHARD:
            setattr(self.model, SYNCED_GENERATION, True)
        return self.optimizer

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if not is_sharded(self.model):
            self.create_optimizer()
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        if _updates_in_backward(check_options(self._options)):
            return None  # there is no moment at which all gradients are there
        return super()._get_grad_norm(*args, **kwargs)  # type: ignore[misc]

    # -- saving ---------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes what ``from_pretrained`` loads, on rank 0. Collective: call it on all ranks."""
        if not is_sharded(self.model):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        folder = self.args.output_dir if output_dir is None else output_dir
        with saved_state(self.model, rank=None if self.args.save_on_each_node else 0) as state:
            write = partial(self._save, folder, state_dict=state)  # type: ignore[attr-defined]
            while_all_wait(runtime_of(self.model).fabric, write if self.args.should_save else None)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Every rank writes its own part of model and optimizer, and its random state."""
        runtime = runtime_of(self.model)
        save(Path(output_dir, STATES), self.model, runtime.optimizer, self.lr_scheduler)  # type: ignore[attr-defined]

    def _save_rng_state(self, output_dir: str) -> None:
        """Does nothing: ``zeroshard.save`` has saved it."""

    # -- going on -------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Of a checkpoint that has shards, the model is loaded with its optimizer. Others are loaded as always."""
        if not _has_states(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _has_states(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        runtime = runtime_of(self.model)
        load(Path(checkpoint, STATES), self.model, runtime.optimizer, self.lr_scheduler)  # type: ignore[attr-defined]
        self._random_state = random_state.read(runtime.fabric.device)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Sets the random generators, after the trainer has passed over the batches that were trained on."""
        if checkpoint is None or not _has_states(checkpoint):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        elif self._random_state is not None:
            random_state.restore(self._random_state, runtime_of(self.model).fabric.device)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint  # type: ignore[attr-defined]
        if _has_states(best):
            load(Path(best, STATES), self.model, random=False)
        else:
            super()._load_best_model()  # type: ignore[misc]


class ShardedTrainer(ShardedTrainerMixin, Trainer):
    """A ``transformers.Trainer`` that shards its model."""


def _has_states(checkpoint: str) -> bool:
    return Path(checkpoint, STATES).is_dir()


def _updates_in_backward(config: Config) -> bool:
    return config.offload is not None and config.offload.update_in_backward


def _mistakes(args: Any, config: Config) -> Iterator[str]:
    """What in ``TrainingArguments`` contradicts sharding, or the options of it."""
    for name, remedy in EXCLUDED.items():
        if getattr(args, name, None):
            yield f"{name}={getattr(args, name)!r} does not go with zeroshard; leave it out: {remedy}"
    if args.n_gpu > 1:
        yield (
            f"one process sees {args.n_gpu} GPUs; start one process a GPU, `torchrun --nproc-per-node {args.n_gpu} ...`"
        )
    if args.gradient_checkpointing and config.activations is not None and config.activations.recompute:
        yield "gradient_checkpointing=True and zeroshard's activations= both recompute the blocks; leave one out"
    if config.clip_grad_norm is not None:
        yield f"clip_grad_norm is max_grad_norm={args.max_grad_norm} of TrainingArguments; leave it out of zeroshard="
    if _updates_in_backward(config) and (args.max_grad_norm > 0 or args.gradient_accumulation_steps > 1):
        yield (
            "update_in_backward uses each gradient as it comes; set max_grad_norm=0 and gradient_accumulation_steps=1, "
            "or leave it out"
        )
