"""The engine that scripts for DeepSpeed train with."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ... import api
from ...runtime import runtime_of
from ...storage.load import load
from ...storage.save import save, while_all_wait
from ...system.structures import map_tensors
from .configuration import Configuration


class Engine(nn.Module):
    """A sharded model with its optimizer, under the names that DeepSpeed's engine has. ``module`` is the model."""

    def __init__(self, module: nn.Module, optimizer: Any, scheduler: Any, configuration: Configuration) -> None:
        super().__init__()
        self.module, self.optimizer, self.lr_scheduler = module, optimizer, scheduler
        self.configuration = configuration
        self.training_dataloader: Any = None
        self.device = next(module.parameters()).device
        known = dist.is_initialized()
        self.global_rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if known else (0, 1)
        self.dp_world_size, self.local_rank = self.world_size, int(os.environ.get("LOCAL_RANK", 0))
        self.global_steps = self.micro_steps = self.global_samples = 0
        self._boundary: bool | None = None
        self._autocast = bool(configuration.settings.get("torch_autocast.enabled"))
        self._stage = api.stats(module).stage
        self._divided = self._applied = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        if hasattr(self.module, name):
            return getattr(self.module, name)
        kind = type(self.module).__name__
        raise AttributeError(f"neither zeroshard's engine for DeepSpeed scripts nor {kind} has {name!r}")

    # -- a step ---------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. In a backward without ``backward()`` the gradients of its outputs are divided."""
        with torch.autocast(self.device.type, torch.bfloat16) if self._autocast else nullcontext():
            output = self.module(*args, **kwargs)
        return map_tensors(self._dividing, output) if self.gradient_accumulation_steps() > 1 else output

    def _dividing(self, output: Tensor) -> Tensor:
        """An alias of an output, whose gradient is divided by the number of micro-batches.

        Nothing in the model uses the alias. So a gradient is divided once, even if an output comes from another.
        """
        if output.grad_fn is None:
            return output
        alias = output.view_as(output)
        alias.register_hook(lambda grad: grad if self._divided else grad / self.gradient_accumulation_steps())
        return alias

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """The backward of a micro-batch. Returns the loss, divided by the number of micro-batches."""
        loss = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        # Gradients that are whole at rest need not be reduced before the last micro-batch.
        waits = self.zero_optimization_stage() < 2 and not self.is_gradient_accumulation_boundary()
        self._divided = True
        try:
            with self.no_sync() if waits else nullcontext():
                loss.backward(retain_graph=retain_graph)
        finally:
            self._divided = False
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """The loss as it is: zeroshard scales gradients at the model's outputs."""
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Updates after the last micro-batch of a step, and steps the scheduler. Else counts the micro-batch."""
        self._applied = False
        if self.is_gradient_accumulation_boundary():
            before = self.skipped_steps
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._applied = self.skipped_steps == before
            if self._applied and self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
            self._report()
        self.micro_steps += 1

    def _report(self) -> None:
        every = self.configuration.settings.get("steps_per_print")
        if every and self.global_rank == 0 and self.global_steps % every == 0:
            print(f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}")

    @property
    def skipped_steps(self) -> int:
        """Steps that were left out, because gradients overflowed or were not finite."""
        return 0 if self.optimizer is None else int(self.optimizer.skipped_steps)

    def was_step_applied(self) -> bool:
        return self._applied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the coming ``step()`` updates."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says whether the coming ``step()`` updates, in place of the count of micro-batches."""
        self._boundary = is_boundary

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside reduce nothing. In every stage; in DeepSpeed in stages 0 and 1."""
        return api.no_sync(self.module)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    # -- what is asked for ----------------------------------------------------------------------------------------

    def gradient_accumulation_steps(self) -> int:
        return self.configuration.gradient_accumulation_steps

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.configuration.train_micro_batch_size_per_gpu

    def train_batch_size(self) -> int:
        return self.configuration.train_batch_size

    def get_batch_info(self) -> tuple[int, int, int]:
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def zero_optimization_stage(self) -> int:
        return self._stage

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def gradient_clipping(self) -> float:
        return float(self.configuration.settings.get("gradient_clipping", 1.0))

    def fp16_enabled(self) -> bool:
        return bool(self.configuration.settings.get("fp16.enabled"))

    def bfloat16_enabled(self) -> bool:
        return bool(self.configuration.settings.get("bf16.enabled"))

    @property
    def loss_scale(self) -> float:
        return api.stats(self.module).loss_scale or 1.0

    def get_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The momentum, or the betas, of each group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The gradient norm of the last step, before clipping."""
        norm = None if self.optimizer is None else self.optimizer.grad_norm
        return None if norm is None else float(norm)

    # -- phases without training ----------------------------------------------------------------------------------

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """All model states sleep in host memory, which is not pinned. Returns when they are there."""
        if include is not None or getattr(device, "value", device) != "cpu":
            raise ValueError("offload_states() puts all states into host memory; leave include= and device= out")
        api.offload_states(self.module)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Brings the states back to the device."""
        api.restore_states(self.module)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves to ``save_dir/tag`` by ``zeroshard.save``. Frozen parameters are always saved. Collective."""
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        counts = [self.global_steps, self.micro_steps, self.global_samples]
        extra = {"client_state": dict(client_state or {}), "counts": counts}
        self._on_rank_zero(lambda: Path(save_dir).mkdir(parents=True, exist_ok=True))
        save(Path(save_dir) / name, self.module, self.optimizer, self.lr_scheduler, extra=extra)
        if save_latest:
            self._on_rank_zero(lambda: (Path(save_dir) / "latest").write_text(name))
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads what ``save_checkpoint`` saved, and returns its folder and client state. Collective."""
        if not load_module_strict:
            raise ValueError("load_module_strict=False is refused: a checkpoint must fit the model; leave it out")
        latest = Path(load_dir) / "latest"
        if tag is None and not latest.is_file():
            warnings.warn(
                f"there is no {latest}, so nothing was loaded; pass tag= to choose a checkpoint", stacklevel=2
            )
            return None, None
        folder = Path(load_dir) / (latest.read_text().strip() if tag is None else str(tag))
        optimizer = self.optimizer if load_optimizer_states and not load_module_only else None
        scheduler = self.lr_scheduler if load_lr_scheduler_states and not load_module_only else None
        extra = load(folder, self.module, optimizer, scheduler, random=False)  # as DeepSpeed
        if not isinstance(extra, dict) or "counts" not in extra:  # zeroshard.save() wrote it, without an engine
            steps = 0 if optimizer is None else optimizer.steps
            counts = [steps, steps * self.gradient_accumulation_steps(), steps * self.train_batch_size()]
            extra = {"counts": counts, "client_state": {}}
        self.global_steps, self.micro_steps, self.global_samples = extra["counts"]
        return str(folder), extra["client_state"]

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Rank 0 writes the whole model for ``torch.load``. Collective."""
        state = api.full_state_dict(self.module, rank=0)
        frozen = {n for n, p in self.module.named_parameters(remove_duplicate=False) if not p.requires_grad}
        left_out = frozen if exclude_frozen_parameters else set()

        def write() -> None:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            with open(Path(save_dir) / save_filename, "wb") as file:  # unlike torch, `open` names the file in errors
                torch.save({n: v for n, v in state.items() if n not in left_out}, file)

        self._on_rank_zero(write)
        return True

    save_fp16_model = save_16bit_model

    def _on_rank_zero(self, work: Callable[[], object]) -> None:
        """Does the work on rank 0 alone. All ranks wait, and all raise if it fails."""
        while_all_wait(runtime_of(self.module).fabric, work if self.global_rank == 0 else None)

    def destroy(self) -> None:
        """Nothing is to be done: memory is given back with the engine."""

    def deepspeed_io(self, dataset: Any, batch_size: int | None = None, collate_fn: Any = None) -> DataLoader[Any]:
        """A loader of this rank's part of a dataset, in DeepSpeed's order."""
        by_index = not isinstance(dataset, IterableDataset)
        return DataLoader(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            sampler=DistributedSampler(dataset, self.world_size, self.global_rank) if by_index else None,
            collate_fn=collate_fn,
            drop_last=bool(self.configuration.settings.get("dataloader_drop_last", False)),
            pin_memory=self.device.type == "cuda",
            num_workers=2 if self.device.type == "cuda" else 0,
        )
