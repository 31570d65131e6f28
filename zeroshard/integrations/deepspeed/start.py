"""``initialize`` and the other functions that scripts for DeepSpeed begin with."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...api import shard
from ...comm.process_group import start_process_group
from ...system.machine import device_of_rank
from .configuration import from_config
from .engine import Engine


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Mapping[str, Any] | None = None,
    auto: Mapping[str, Any] | None = None,
) -> tuple[Engine, Any, Any, Any]:
    """Shards a model as a DeepSpeed configuration says. Returns engine, optimizer, data loader and scheduler.

    ``optimizer`` and ``lr_scheduler`` count before those of the configuration. ``auto`` has the values of keys that are
    "auto". The other arguments are DeepSpeed's.
    """
    if model is None:
        raise ValueError("initialize() needs model=")
    if mpu is not None or mesh_param is not None:
        raise ValueError(
            "mpu= and mesh_param= are refused: apply torch's parallelize_module, and call zeroshard.shard() with mesh="
        )
    config = next((each for each in (config, config_params, getattr(args, "deepspeed_config", None)) if each), None)
    if config is None:
        raise ValueError("initialize() needs config=, or --deepspeed_config in args")
    init_distributed()
    sections = [name for name, given in (("optimizer", optimizer), ("scheduler", lr_scheduler)) if given is not None]
    configuration = from_config(config, auto, without=sections)
    if optimizer is None or not isinstance(optimizer, torch.optim.Optimizer):
        parameters = list(model.parameters() if model_parameters is None else model_parameters)
        optimizer = configuration.optimizer(parameters) if optimizer is None else optimizer(parameters)
    options = dict(configuration.options)
    if optimizer is None:
        options.pop("clip_grad_norm", None)  # nothing is trained, and nothing clipped
    model, sharded = shard(model, optimizer, **options)
    if lr_scheduler is None:
        lr_scheduler = None if sharded is None else configuration.scheduler(sharded)
    elif callable(lr_scheduler):
        lr_scheduler = lr_scheduler(sharded)
    engine = Engine(model, sharded, lr_scheduler, configuration)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    return engine, sharded, engine.training_dataloader, lr_scheduler


def init_distributed(*args: Any, **kwargs: Any) -> None:
    """Starts the process group, if there is none. torchrun's environment and the device decide, not the arguments."""
    if not dist.is_initialized():
        start_process_group(device_of_rank(torch.device("cuda" if torch.cuda.is_available() else "cpu")))


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--deepspeed`` and ``--deepspeed_config`` to a script's arguments."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="accepted, without effect")
    group.add_argument("--deepspeed_config", help="JSON file of the configuration")
    return parser
