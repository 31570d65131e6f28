"""Gives flats their home on the host: which units, and whether there is enough memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.fabric import Fabric
from ..comm.parallel import local
from ..config.offload import Offload
from ..config.options import Config
from ..states.flat import Flat
from ..states.turns import Turns
from ..states.unit import Unit
from ..system import compat, machine
from ..system.device import available_memory
from ..system.sizes import size_text
from .home import HostHome
from .host_buffers import HostBuffers
from .pipeline import Pipeline
from .rules import moment_names
from .step import HostStep

ROOM = "the agreement on memory for an offload"
DEVICE_SHARE = 0.6
"""The part of the device's free memory for model states with host_fraction="auto". The rest is for activations."""


def place_on_host(
    units: Sequence[Unit], optimizer: torch.optim.Optimizer | None, config: Config, fabric: Fabric, turns: Turns
) -> HostStep | None:
    """Gives flats their home on the host, as the options say. None if all states stay on the device."""
    options = config.offload
    if options is None:
        return None
    needing_norm = (config.clip_grad_norm, config.precision.loss_scale, config.on_nonfinite)
    norms = any(option is not None for option in needing_norm)
    dry = any(compat.is_fake(parameter) for unit in units for flat in unit.flats for parameter in flat.parameters)
    tell = fabric.watchdog.fail
    pipeline = Pipeline(
        options,
        fabric.device,
        norms=norms,
        local_ranks=fabric.local_ranks,
        waits=fabric.waits,
        dry=dry,
        tell=tell,
    )
    _check_kernel(pipeline, options, fabric)
    moments = None if optimizer is None else moment_names(optimizer)
    step = HostStep(pipeline, units, optimizer)
    flats = [flat for unit in units for flat in unit.flats]
    for flat, stays in zip(flats, _stay(flats, options, fabric), strict=True):
        if flat.trainable and not stays:
            assert moments is not None
            _check_dtype(flat)
            home = HostHome(flat, pipeline, step, HostBuffers(options, flat.dtype, flat.own.numel, moments))
            step.homes[flat] = home
            flat.live_in(home, turns)
        elif not flat.trainable and options.parameters == "cpu":
            buffers = HostBuffers(options, flat.dtype, flat.shard_range.numel)
            flat.live_in(HostHome(flat, pipeline, step, buffers), turns)
    if not pipeline.buffers:
        if fabric.rank == 0 and options.host_fraction == "auto":
            print("zeroshard: all states fit the device's budget, so nothing is offloaded")
        return None
    if not dry:
        _check_room(pipeline, options, fabric)
    _allocate(pipeline, fabric)
    return step


def _allocate(pipeline: Pipeline, fabric: Fabric) -> None:
    """Takes the memory on all ranks or raises on all ranks: a rank that failed alone would leave the others waiting."""
    problem: ValueError | None = None
    try:
        pipeline.allocate()
    except ValueError as error:
        problem = error
    if fabric.maximum([problem is not None], ROOM)[0]:
        raise problem or ValueError("offload: another rank could not pin its host memory; its message says why")


def room_for_states(device: torch.device, sharing: int, movable: int = 0) -> int:
    """Bytes of the device that host_fraction="auto" uses for states if ``device_memory`` is not given.

    ``sharing``: ranks on this device. ``movable``: bytes of it that parameters have which will move into flats.
    """
    return int(DEVICE_SHARE * (available_memory(device, sharing) + movable))


def _stay(flats: Sequence[Flat], options: Offload, fabric: Fabric) -> list[bool]:
    """For each flat: whether its states stay on the device. A flat without states takes no room there."""
    sizes = [flat.own.numel if flat.trainable else 0 for flat in flats]
    if options.host_fraction != "auto":
        return stay_on_device(sizes, options.host_fraction)
    budget = options.device_memory
    if budget is None:
        movable = sum(local(p).nbytes for flat in flats for p in flat.parameters if p.device == fabric.device)
        budget = room_for_states(fabric.device, fabric.device_ranks, movable)
    at_rest = sum(flat.at_rest.numel * flat.dtype.itemsize for flat in flats)
    widest = max(flat.dtype.itemsize for flat in flats)
    masters = 4 if any(flat.master_dtype is not flat.dtype for flat in flats) else 0
    budget = -fabric.maximum([at_rest - budget], ROOM)[0]
    return stay_within(sizes, widest + masters + 8, max(budget, 0))


def _check_kernel(pipeline: Pipeline, options: Offload, fabric: Fabric) -> None:
    kernels = fabric.gather_objects("native" if pipeline.pool.native else "torch")
    if len(set(kernels)) > 1:
        named = ", ".join(f"rank {rank}: {kernel}" for rank, kernel in enumerate(kernels))
        raise ValueError(
            f"offload: ranks have different host kernels, which round differently ({named}); `zeroshard doctor` on "
            "each machine says why, and ZEROSHARD_KERNEL=torch makes all of them use torch's"
        )
    if not pipeline.pool.native and (options.split_master or options.moments is not torch.float32):
        raise ValueError(
            "offload.split_master and offload.moments need the native kernel, which could not be built "
            f"({pipeline.pool.choice.reason}); install a C++ compiler, or leave them out"
        )


def _check_dtype(flat: Flat) -> None:
    if flat.dtype is torch.float64 or flat.master_dtype is not torch.float32:
        raise ValueError(
            f"offload: parameter {flat.layout.slots[0].name!r} is {flat.dtype} without an fp32 master, which the host "
            'kernel needs; pass precision="bf16", "fp16" or "fp32"'
        )


def _check_room(pipeline: Pipeline, options: Offload, fabric: Fabric) -> None:
    needed = pipeline.bytes
    share = pipeline.local_ranks
    available = machine.available_memory() // share
    source = "available" if share == 1 else f"available to each of {share} ranks on this host"
    if options.host_memory is not None and options.host_memory < available:
        available, source = options.host_memory, "allowed by offload.host_memory"
    lacking = fabric.maximum([needed.total - available], ROOM)[0]
    if lacking > 0:
        if needed.total <= available:
            available, source = max(0, needed.total - lacking), "available to another rank"
        raise ValueError(
            f"offload needs {size_text(needed.total)} of host memory a rank ({size_text(needed.pinned)} of it pinned), "
            f'but {size_text(available)} are {source}; use moments=torch.bfloat16 or "8bit", update_in_backward=True, '
            "split_master=True with read_back=True, keep a part on the device with host_fraction=, or add ranks"
        )


def stay_on_device(sizes: Sequence[int], host_fraction: float) -> list[bool]:
    """For flats in the order in which forward needs them: whether the states of each stay on the device.

    The first flats stay, because the next forward would wait for them first. Together they are ``1 - host_fraction`` of
    all elements.

    >>> stay_on_device([4, 2, 2, 2], host_fraction=0.3)
    [True, True, False, False]
    """
    return _first(sizes, round((1 - host_fraction) * sum(sizes)))


def stay_within(sizes: Sequence[int], bytes_on_device: float, budget: int) -> list[bool]:
    """As ``stay_on_device``, but the flats that stay fit in ``budget`` bytes, at ``bytes_on_device`` an element."""
    return _first(sizes, int(budget / bytes_on_device))


def _first(sizes: Sequence[int], room: int) -> list[bool]:
    """For each size, in order: whether it still fits. A size that does not fit is left out; later sizes may fit."""
    chosen = []
    for size in sizes:
        chosen.append(size <= room)
        room -= size if chosen[-1] else 0
    return chosen
