"""The one entry point, ``shard()``, and the few functions that go with it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor, nn

from .comm import parallel
from .comm.consistency import OF_ONE_RANK_OFFLOADING, check_same_everywhere
from .comm.fabric import Fabric
from .comm.process_group import start_process_group
from .config.optimizers import check_covers, check_elementwise
from .config.options import Config
from .observe.ledger import Stats
from .offload.rules import check_has_kernel
from .optim.optimizer import ShardedOptimizer
from .runtime import Runtime, is_sharded, runtime_of, runtimes_of_parameters
from .system import compat, machine

if TYPE_CHECKING:
    from .plan.foresee import Advice, Foresight

Model = TypeVar("Model", bound=nn.Module)


@overload
def shard(model: Model, optimizer: torch.optim.Optimizer, **options: Any) -> tuple[Model, ShardedOptimizer]: ...
@overload
def shard(model: Model, optimizer: None = None, **options: Any) -> tuple[Model, None]: ...
def shard(
    model: Model, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> tuple[Model, ShardedOptimizer | None]:
    """Divides a model's states among the ranks; returns the same model, and the optimizer to train it with.

    Options are the fields of ``zeroshard.Config``. Call it on every rank, with the same model and options; without
    torchrun it is a world of one.

    >>> model = nn.Linear(4, 2)
    >>> model, optimizer = shard(model, torch.optim.AdamW(model.parameters()), stage=2)
    >>> loss = model(torch.ones(1, 4)).sum()
    >>> loss.backward()
    >>> optimizer.step()
    """
    config = Config.parse(options)
    _check_model(model)
    if optimizer is None:
        _check_frozen(model, config)
    else:
        _check_optimizer(model, optimizer, config)
    device = _choose_device(model, config)
    start_process_group(device)
    dtypes = {config.precision.parameters or parameter.dtype for parameter in model.parameters()}
    if device.type == "cpu" and torch.bfloat16 in dtypes:
        message = machine.ensure_bf16_matmul()
        if message is not None:
            print(message)
    fabric = Fabric(device, config.stall_timeout, config.mesh, parallel.mesh_of(model))
    check_same_everywhere(model, optimizer, config, fabric)
    if config.activations is not None and config.activations.partition and fabric.model.world == 1:
        raise ValueError(
            "activations.partition divides checkpoints among model-parallel ranks, and this model has no tensor "
            "parallelism: parallelise it before shard(), or leave partition out (offload=True keeps whole checkpoints "
            "on the host)"
        )
    config, foresight = _consult_plan(model, optimizer, config, fabric)
    runtime = Runtime(model, optimizer, config, fabric)
    if foresight is not None:
        runtime.shortage.suggest = partial(foresight.instead, runtime.stage, config.offload)
    if len(runtime.units) == 1 and fabric.world > 1 and fabric.rank == 0:
        warnings.warn(
            f"{type(model).__name__} has no repeated blocks, so it is one unit: nothing overlaps, and stage 3 gathers "
            "all of it at once; name modules with units= if it has parts worth a unit",
            stacklevel=2,
        )
    return model, runtime.optimizer


@contextmanager
def gathered(what: nn.Module | nn.Parameter | Iterable[nn.Parameter], *, write: bool = False) -> Iterator[None]:
    """Inside this block the given parameters (of a sharded model, or some of them) are whole and can be read.

    With ``write=True`` rank 0's changes reach every rank and the master, and survive the next step; without it a
    change raises when the block ends. Collective: enter it on all ranks.
    """
    if isinstance(what, nn.Parameter):
        what = [what]
    parameters = list(what.parameters()) if isinstance(what, nn.Module) else list(what)
    with ExitStack() as stack:
        for runtime, units in runtimes_of_parameters(parameters).items():
            stack.enter_context(runtime.gathered(units, write=write, lend=True))
        yield


def full_state_dict(model: nn.Module, rank: int | None = None) -> dict[str, Tensor]:
    """The model's whole state dict in CPU tensors, on every rank, or on ``rank`` alone (others get an empty dict).

    Gathers one unit at a time. Collective: call it on all ranks.
    """
    runtime = runtime_of(model)
    if rank is not None and not 0 <= rank < runtime.fabric.world:
        raise ValueError(f"rank={rank} does not exist in a world of {runtime.fabric.world}")
    wanted = rank is None or rank == runtime.fabric.rank
    values: dict[int, Tensor] = {}
    for parameter, whole in runtime.whole_parameters():
        if wanted:
            values[id(parameter)] = whole.to("cpu", copy=True)
    if not wanted:
        return {}
    with runtime.guards.names_only():
        names = model.state_dict(keep_vars=True)
    found: dict[str, Tensor] = {}
    for name, value in names.items():
        if id(value) in values:
            found[name] = values[id(value)]
        else:
            found[name] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
    return found


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes inside this block keep their gradients on their rank; the next one outside reduces the sum.

    Saves traffic when micro-batches accumulate, for the memory of whole gradients.
    """
    reducer = runtime_of(model).reducer
    before, reducer.synchronous = reducer.synchronous, False
    try:
        yield
    finally:
        reducer.synchronous = before


def synchronize(model: nn.Module) -> None:
    """Waits for updates under way, so that parameters that are whole at rest show their values.

    What a delayed update has made is published too. With offload in stages 1 and 2 it is collective: call it on all
    ranks.
    """
    runtime_of(model).synchronize()


def stats(model: nn.Module) -> Stats:
    """Volume, memory by kind, gradient norm and skipped steps of a sharded model, on this rank."""
    return runtime_of(model).stats()


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if is_sharded(model):
        raise ValueError("the model, or a part of it, is sharded already; call shard() once, on the whole model")
    if next(model.parameters(), None) is None:
        raise ValueError(f"{type(model).__name__} has no parameters, so there is nothing to shard")
    if torch.is_inference_mode_enabled():
        raise ValueError("shard() was called under torch.inference_mode(), where nothing is trained; call it outside")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise ValueError(
            f"the model's parameters are on several devices ({', '.join(sorted(map(str, devices)))}); put them on one, "
            "or leave all on the CPU and let shard() move them"
        )
    for name, module in model.named_modules():
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


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> None:
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


def _choose_device(model: nn.Module, config: Config) -> torch.device:
    wanted = config.device
    if wanted is None:
        wanted = next(model.parameters()).device
        if wanted.type in ("cpu", "meta"):
            wanted = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = machine.device_of_rank(wanted)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _consult_plan(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, fabric: Fabric
) -> tuple[Config, Foresight | None]:
    """Takes the stage and offload that were left to the plan, and warns of what cannot fit; alike on all ranks."""
    if any(compat.is_fake(parameter) for parameter in model.parameters()):  # a dry run, which takes no memory
        if config.stage == "auto" or config.chooses_offload:
            raise ValueError('"auto" asks what fits this machine, and a dry run without a device takes no memory')
        return config, None
    from .plan import foresee  # late, for it takes time and is needed once

    room = foresee.least(fabric.gather_objects(foresee.room_of(model, fabric.device, fabric.local_ranks)))
    foresight = foresee.Foresight(model, optimizer, config, fabric.shards, room)
    advice = foresight.advise()
    if config.stage == "auto" or config.chooses_offload:
        advice = _of_this_rank(fabric.from_rank_zero(advice), config)
    if fabric.rank == 0 and advice.chosen is not None:
        print(advice.chosen)
    if fabric.rank == 0 and advice.warning is not None:
        warnings.warn(advice.warning, stacklevel=3)
    foresight.config = replace(config, stage=advice.stage, offload=advice.offload, example=None)
    return foresight.config, foresight


def _of_this_rank(advice: Advice, config: Config) -> Advice:
    """Rank 0's advice, for what is known of a machine differs from node to node; with the limits of this rank."""
    if advice.offload is None or config.offload is None:
        return advice
    mine = {name: getattr(config.offload, name) for name in OF_ONE_RANK_OFFLOADING}
    return replace(advice, offload=replace(advice.offload, **mine))
