"""The entry point, ``shard()``, and the functions for models that it has sharded."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from .comm import parallel
from .comm.consistency import OF_ONE_RANK_OFFLOADING, check_same_everywhere
from .comm.fabric import Fabric
from .comm.process_group import start_process_group
from .config.offload import Offload
from .config.options import Config
from .observe.ledger import Stats
from .optim.optimizer import ShardedOptimizer
from .recorder.recorder import Recorder
from .refusals import check_model, check_optimizer, check_partition
from .runtime import Runtime, runtime_of, runtimes_of_parameters
from .system import allocator, compat, machine
from .system.hook import Hook

if TYPE_CHECKING:
    from .plan.foresee import Advice, Decision, Foresight

Model = TypeVar("Model", bound=nn.Module)


@overload
def shard(model: Model, optimizer: torch.optim.Optimizer, **options: Any) -> tuple[Model, ShardedOptimizer]: ...
@overload
def shard(model: Model, optimizer: None = None, **options: Any) -> tuple[Model, None]: ...
def shard(
    model: Model, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> tuple[Model, ShardedOptimizer | None]:
    """Divides a model's states among the ranks. Returns the same model, and the optimizer to train it with.

    Options are the fields of ``zeroshard.Config``. Call ``shard()`` on every rank, with the same model and options.
    Without torchrun there is one rank.

    >>> model = nn.Linear(4, 2)
    >>> model, optimizer = shard(model, torch.optim.AdamW(model.parameters()), stage=2)
    >>> loss = model(torch.ones(1, 4)).sum()
    >>> loss.backward()
    >>> optimizer.step()
    """
    config = Config.parse(options)
    check_model(model, config)
    check_optimizer(model, optimizer, config)
    device = _choose_device(model, config)
    if config.defragment:
        allocator.defragment(device)
    start_process_group(device)
    _prepare_bf16(model, device, config)
    fabric = Fabric(device, config.stall_timeout, config.mesh, parallel.mesh_of(model))
    with fabric.watchdog.during("shard()"):
        check_same_everywhere(model, optimizer, config, fabric)
        check_partition(config, fabric)
        config, foresight, decision = _consult_plan(model, optimizer, config, fabric)
        runtime = Runtime(model, optimizer, config, fabric)
    if decision is not None:
        runtime.start_recomputing(decision.recomputed, decision.sizes, decision.reason)
    if foresight is not None:
        runtime.shortage.suggest = partial(foresight.instead, runtime.stage, config.offload)
        runtime.plan_beside = partial(_beside, foresight, runtime.stage, config.offload)
    _warn_of_one_unit(runtime)
    _add_no_sync(model)
    return model, runtime.optimizer


@contextmanager
def gathered(what: nn.Module | nn.Parameter | Iterable[nn.Parameter], *, write: bool = False) -> Iterator[None]:
    """Inside this block the parameters of a model, of a part of it, or single parameters are whole and can be read.

    With ``write=True`` rank 0's changes reach every rank and the master, and survive the next step. Without
    ``write=True`` a change raises when the block ends. Collective: enter the block on all ranks.
    """
    if isinstance(what, nn.Parameter):
        what = [what]
    parameters = list(what.parameters()) if isinstance(what, nn.Module) else list(what)
    with ExitStack() as stack:
        for runtime, units in runtimes_of_parameters(parameters).items():
            stack.enter_context(runtime.gathering.gathered(units, write=write, lend=True))
        yield


@contextmanager
def gathered_gradients(model: nn.Module) -> Iterator[None]:
    """Inside this block ``parameter.grad`` of the whole model is whole: the averaged gradient, without loss scale.

    ``grad`` is None where no rank used the parameter. Changes count, in place or by assignment: make the same changes
    on all ranks, and each rank takes its part when the block ends. The block is between ``backward()`` and ``step()``.
    Collective: enter the block on all ranks. It takes the memory of all gradients, and a gather of them.
    """
    with runtime_of(model).gathered_gradients():
        yield


def full_state_dict(
    model: nn.Module, rank: int | None = None, only: Callable[[str], bool] | None = None
) -> dict[str, Tensor]:
    """The model's whole state dict in CPU tensors. With ``rank``, all other ranks get an empty dict.

    ``only`` is asked for every name whether its tensor is wanted, and must answer the same on all ranks. A frozen base
    is then not gathered for the sake of its adapters: ``only=lambda name: "lora_" in name``.

    Gathers one unit at a time. Collective: call it on all ranks.
    """
    runtime = runtime_of(model)
    if rank is not None and not 0 <= rank < runtime.fabric.world:
        raise ValueError(f"rank={rank} does not exist in a world of {runtime.fabric.world}")
    wanted = rank is None or rank == runtime.fabric.rank
    # All ranks take part in the gathers. Only the ranks that want the values copy them.
    with runtime.fabric.watchdog.during("full_state_dict()"):
        names = {
            name: value
            for name, value in runtime.model.state_dict(keep_vars=True).items()
            if only is None or only(name)
        }
        parameters = runtime.gathering.whole_parameters(
            None if only is None else {id(value) for value in names.values()}
        )
        values = {id(parameter): whole.to("cpu", copy=True) for parameter, whole in parameters if wanted}
        runtime.fabric.watchdog.check()  # a gather that was aborted meanwhile has not brought its values
    if not wanted:
        return {}
    found: dict[str, Tensor] = {}
    for name, value in names.items():
        if id(value) in values:
            found[name] = values[id(value)]
        else:
            found[name] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
    return found


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields name and whole value of every parameter, for inference engines. One unit at a time is put together.

    Names are those of ``state_dict()``. A tied parameter comes once, under its first name, as in Hugging Face's
    checkpoints. The values are copies on the model's device, in the parameters' dtype: keep them, or hand them on. A
    unit and its copies are the most that is held. Between two parameters nothing is gathered, so a loop may end early.

    Collective: iterate on all ranks, equally far.

    >>> model, _ = shard(nn.Linear(4, 2).requires_grad_(False))
    >>> [(name, tuple(value.shape)) for name, value in whole_parameters(model)]
    [('weight', (2, 4)), ('bias', (2,))]
    """
    runtime = runtime_of(model)
    runtime.check_awake("whole_parameters()")
    names = {id(parameter): name for name, parameter in runtime.model.named_parameters()}

    def by_name() -> Iterator[tuple[str, Tensor]]:
        for unit in runtime.gathering.whole_units():
            unit.reverse()
            while unit:  # what was yielded is not held any longer
                parameter, whole = unit.pop()
                yield names[id(parameter)], whole

    return by_name()


def offload_states(model: nn.Module) -> None:
    """All model states of this rank sleep in host memory, so that something else, such as generation, has the device.

    Parameters, masters, the optimizer's states and gathered units leave the device. The model's buffers stay. Until
    ``restore_states(model)``, whatever needs the states raises: forward, ``step()``, ``save()``, reads of parameters.
    Training then goes on with the same bits. Call it after ``step()``: gradients that wait for their step are refused.

    Views of parameters that you have stored keep their memory on the device, and show old values from then on.
    Collective: call it on all ranks.
    """
    runtime_of(model).sleep.begin()


def restore_states(model: nn.Module) -> None:
    """Brings the states that ``offload_states(model)`` put to sleep back to the device.

    If the device lacks memory, the error leaves the rest asleep: free memory, and call it again. Call it on all ranks.
    """
    runtime_of(model).sleep.end()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes inside this block reduce nothing. The next backward outside the block reduces the sum.

    This saves traffic when micro-batches accumulate, and takes the memory of whole gradients.
    """
    reducer = runtime_of(model).reducer
    before, reducer.synchronous = reducer.synchronous, False
    try:
        yield
    finally:
        reducer.synchronous = before


def _add_no_sync(model: nn.Module) -> None:
    """Gives the model DDP's method ``no_sync()``, so that a loop that was written for DDP stays as it is."""
    if not hasattr(model, "no_sync"):
        reference = weakref.ref(model)  # else the model would hold itself
        setattr(model, "no_sync", Hook(lambda: no_sync(cast(nn.Module, reference()))))  # noqa: B010 - for mypy


def synchronize(model: nn.Module) -> None:
    """Waits for updates under way. Parameters that are whole at rest can then be read.

    Also publishes a delayed update. With offload in stages 1 and 2 this is collective: call it on all ranks.
    """
    runtime_of(model).synchronize()


def stats(model: nn.Module) -> Stats:
    """Volume, memory by kind, gradient norm and skipped steps of a sharded model, on this rank."""
    return runtime_of(model).stats()


def record(model: nn.Module, folder: str | Path, *, tokens: int | None = None, name: str = "") -> Recorder:
    """Records a training loop in a folder, and ends with one HTML file that shows it, ``report.html``.

    The recorder sees every ``optimizer.step()`` by itself. ``run.log(loss=...)`` adds the loss, as a number or as a
    tensor of the device, which is read later and not waited for. ``tokens`` are those of all ranks in one step, if the
    report is to show tokens/s. A few early steps are traced; between steps, the trace waits for the device twice.

    Call it on all ranks; rank 0 writes. Lines are appended to ``record.jsonl``, so a crash loses none, and a run that
    goes on in the same folder continues the record. ``zeroshard report`` makes the page from it at any time.

    >>> import tempfile
    >>> model = nn.Linear(4, 2)
    >>> model, optimizer = shard(model, torch.optim.AdamW(model.parameters()))
    >>> folder = tempfile.TemporaryDirectory()
    >>> with record(model, folder.name) as run:  # doctest: +ELLIPSIS
    ...     loss = model(torch.ones(1, 4)).sum()
    ...     loss.backward()
    ...     optimizer.step()
    ...     run.log(loss=loss)
    zeroshard: report: ...report.html
    """
    return Recorder(model, folder, tokens=tokens, name=name, say=lambda text: print(f"zeroshard: {text}"))


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


def _prepare_bf16(model: nn.Module, device: torch.device, config: Config) -> None:
    """Works around CPUs on which a bf16 matrix product ends the process."""
    dtypes = {config.precision.parameters or parameter.dtype for parameter in model.parameters()}
    if device.type == "cpu" and torch.bfloat16 in dtypes:
        message = machine.ensure_bf16_matmul()
        if message is not None:
            print(message)


def _warn_of_one_unit(runtime: Runtime) -> None:
    if len(runtime.units) == 1 and runtime.fabric.world > 1 and runtime.fabric.rank == 0:
        warnings.warn(
            f"{type(runtime.model).__name__} has no repeated blocks, so it is one unit: nothing overlaps, and stage 3 "
            "gathers all of it at once; name modules with units= if it has parts worth a unit",
            stacklevel=3,
        )


def _beside(foresight: Foresight, stage: int, offload: Offload | None, micro_batches: int) -> dict[str, Any]:
    """What the plan says of a run and of the other stages. A report asks."""
    from .plan.beside import beside  # as the plan itself, imported when it is needed

    return beside(foresight, stage, offload, micro_batches)


def _consult_plan(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, fabric: Fabric
) -> tuple[Config, Foresight | None, Decision | None]:
    """Fills in a stage or offload of "auto", the same on all ranks. Warns if the configuration does not fit.

    With ``recompute="auto"`` and an example, also decides how many blocks are recomputed. Raises on all ranks, before
    memory is taken, if nothing fits that may be chosen.
    """
    if any(compat.is_fake(parameter) for parameter in model.parameters()):  # a dry run without a device
        if config.stage == "auto" or config.chooses_offload:
            raise ValueError('"auto" asks what fits this machine, and a dry run without a device takes no memory')
        return config, None, None
    from .plan.foresee import Foresight  # imported here, because it takes time and is needed once
    from .plan.room import least, room_of

    room = room_of(model, fabric.device, config, local_ranks=fabric.local_ranks, device_ranks=fabric.device_ranks)
    room = least(fabric.gather_objects(room))
    foresight = Foresight(model, optimizer, config, fabric.shards, room)
    advice = foresight.advise()
    if config.stage == "auto" or config.chooses_offload:
        advice = _of_this_rank(fabric.from_rank_zero(advice), config)
    if advice.problem is not None:
        raise ValueError(advice.problem)
    if fabric.rank == 0 and advice.chosen is not None:
        print(advice.chosen)
    if fabric.rank == 0 and advice.warning is not None:
        warnings.warn(advice.warning, stacklevel=3)
    foresight.config = replace(config, stage=advice.stage, offload=advice.offload, example=None)
    undecided = config.activations is not None and config.activations.recompute == "auto"
    return foresight.config, foresight, fabric.from_rank_zero(advice.decision) if undecided else None


def _of_this_rank(advice: Advice, config: Config) -> Advice:
    """Rank 0's advice, with the memory limits of this rank: each node may be a different machine."""
    asked = config.choice or config.offload
    if advice.offload is None or asked is None:
        return advice
    mine = {name: getattr(asked, name) for name in OF_ONE_RANK_OFFLOADING if hasattr(asked, name)}
    return replace(advice, offload=replace(advice.offload, **mine))
