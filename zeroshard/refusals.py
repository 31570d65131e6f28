"""What ``shard()`` refuses: models, optimizers and options that cannot be sharded, or not together."""

from __future__ import annotations

import torch
from torch import nn

from .comm.fabric import Fabric
from .config.optimizers import check_covers, check_elementwise
from .config.options import Config
from .offload.rules import check_has_kernel
from .optim.optimizer import ShardedOptimizer
from .runtime import is_sharded
from .schedule.structure import leave, parallel_wrapper


def check_model(model: nn.Module, config: Config) -> None:
    """Raises if this model cannot be sharded."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if is_sharded(model):
        raise ValueError("the model, or a part of it, is sharded already; call shard() once, on the whole model")
    if next(model.parameters(), None) is None:
        raise ValueError(f"{type(model).__name__} has no parameters, so there is nothing to shard")
    if torch.is_inference_mode_enabled():
        raise ValueError("shard() was called under torch.inference_mode(), where nothing is trained; call it outside")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 and config.weights is not None:  # files fill what is on meta; new adapters may have values
        devices.discard(torch.device("meta"))
    if len(devices) > 1:
        raise ValueError(
            f"the model's parameters are on several devices ({', '.join(sorted(map(str, devices)))}); put them on one, "
            "or leave all on the CPU and let shard() move them"
        )
    for name, module in model.named_modules():
        wrapper = parallel_wrapper(module)
        if wrapper is not None:
            what = repr(name) if name else "the model"
            raise ValueError(f"{what} was given to {wrapper} before shard(); {leave(wrapper)}")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(f"{name!r} has sparse gradients, which cannot be sharded; build it with sparse=False")
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise ValueError(
                f"parameter {name!r} was made under torch.inference_mode(), so it cannot be trained; build the model "
                "outside that mode"
            )
        if not parameter.is_floating_point():
            raise ValueError(
                f"parameter {name!r} is {parameter.dtype}; only real floating-point parameters can be sharded, so make "
                "it a buffer"
            )
    if not any(parameter.is_meta for parameter in model.parameters()):
        for name, buffer in model.named_buffers():
            if buffer.is_meta:
                raise ValueError(f"buffer {name!r} is on the meta device, the parameters are not; give it values")


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config) -> None:
    """Raises if this optimizer cannot train shards of this model."""
    if optimizer is None:
        _check_frozen(model, config)
        return
    if isinstance(optimizer, ShardedOptimizer):
        raise ValueError("the optimizer is sharded already; build a new one for this model")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    check_elementwise(optimizer, config.elementwise)
    if config.offload is not None:
        check_has_kernel(optimizer)
    check_covers(optimizer, model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("no parameter of the model requires a gradient; leave the optimizer out")
    if any(group.get("differentiable", False) for group in optimizer.param_groups):
        raise ValueError("an optimizer with differentiable=True cannot be sharded; leave it out")


def _check_frozen(model: nn.Module, config: Config) -> None:
    only_states = config.offload is not None and config.offload.parameters != "cpu"
    for name, given in (
        ("clip_grad_norm", config.clip_grad_norm is not None),
        ("elementwise", config.elementwise),
        ("offload", only_states),
    ):
        if given:
            raise ValueError(f"{name}={getattr(config, name)!r} has no effect without an optimizer; leave it out")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if trained:
        raise ValueError(
            f"optimizer=None is for frozen models, but {trained[0]!r} requires a gradient; pass the optimizer, or "
            "freeze the model with model.requires_grad_(False)"
        )


def check_partition(config: Config, fabric: Fabric) -> None:
    """Raises if checkpoints are to be divided among tensor-parallel ranks, and there is no tensor parallelism."""
    if config.activations is not None and config.activations.partition and fabric.model.world == 1:
        raise ValueError(
            "activations.partition divides checkpoints among model-parallel ranks, and this model has no tensor "
            "parallelism: parallelise it before shard(), or leave partition out (offload=True stores whole checkpoints "
            "on the host)"
        )
