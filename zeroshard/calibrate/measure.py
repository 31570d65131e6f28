"""Measures this machine in less than a minute, and writes a machine profile.

    calibration = calibrate()
    write(calibration, "mine.toml")         # for `zeroshard plan --machine mine.toml`

Measured are: the speed of transformer blocks and plain products by size, memory, the update on the host, PCIe if there
is a GPU, and collectives if several ranks run. All ranks must call ``calibrate`` together. Values that cannot be
measured here are taken from the nearest profile, and the file says so.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..plan.machine.profile import DEVICE_UPDATE_BYTES, Machine, load
from ..system import machine as facts
from .block_speed import CPU_SIZES, GPU_SIZES, OTHER_PRECISION_SIZES, fit, pass_through, product_rate
from .launch_time import launch_seconds
from .stopwatch import seconds_of, seconds_once, settled_seconds_of
from .update_probe import UPDATE_BYTES, BusyHost, UpdateProbe

HOST_PARAMETERS = 48 << 20
"""Parameters in one update of the host: 0.7 GB of states, more than fits into a cache."""
THREAD_PARAMETERS = 4 << 20
"""Parameters in one update of one thread."""
COPY_BYTES = 256 << 20
"""Bytes of one copy between host and device."""
MESSAGE_BYTES = 64 << 20
"""Bytes of the large all-reduce."""
UPDATED = (8 << 20,) * 8
"""Elements of the parameters in one update on the device."""


@dataclass(frozen=True)
class Calibration:
    """A profile, and which of its values were measured."""

    machine: Machine
    base: str
    """The name of the profile that all other values are taken from."""
    measured: frozenset[str]
    """Keys of measured values as in a profile, for example ``device.bandwidth``."""
    seconds: float
    """Seconds that measuring took."""


def calibrate(device: torch.device | None = None) -> Calibration:
    """Measures this machine. With several ranks, all call it together, and all get the result of the first rank."""
    begin = time.perf_counter()
    device = device or this_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        facts.ensure_bf16_matmul()
    base, known = nearest_profile(device)
    base = replace(base, name="this machine", title=facts.device_title(device), devices_per_node=_local_ranks(device))
    found: dict[str, float] = {}
    found |= _measure_device(device, base, known)
    with UpdateProbe(device, HOST_PARAMETERS) as update:
        busy_host = BusyHost(update)
        if device.type == "cuda" and not _several():  # with other ranks, their collectives would be timed too
            found |= launch_seconds(device, busy_host)
        found |= _measure_host(update, busy_host)
    found |= _measure_copies(device)
    found |= _measure_links(device)
    shared = _of_first_rank((found, time.perf_counter() - begin), device)
    return Calibration(with_values(base, shared[0]), _base_name(device), frozenset(shared[0]), shared[1])


def nearest_profile(device: torch.device) -> tuple[Machine, bool]:
    """The profile to start from, and whether it is the profile of this device."""
    name = _base_name(device)
    return load(name), device.type == "cuda" and name.upper() in torch.cuda.get_device_name(device).upper()


def _base_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    here = torch.cuda.get_device_name(device).upper()
    return next((name for name in ("h200", "h100", "a100", "v100") if name.upper() in here), "a100")


# -- measurements -------------------------------------------------------------------------------------------------


def _measure_device(device: torch.device, base: Machine, known: bool) -> dict[str, float]:
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    short = torch.bfloat16 if device.type == "cpu" or torch.cuda.is_bf16_supported() else torch.float16
    # How speed grows with size is measured in the usual precision of the device, and used for both precisions.
    main, other = (torch.float32, short) if device.type == "cpu" else (short, torch.float32)
    speed = fit([pass_through(device, main, size) for size in sizes])
    there = pass_through(device, other, OTHER_PRECISION_SIZES[device.type])
    # Small products lose the same time in both precisions. Writing takes time in proportion to the width.
    writing = speed.write_seconds * other.itemsize / main.itemsize
    lost = speed.half_work / speed.rate * there.flops / there.size.work + writing * there.written
    rates = {main: speed.rate, other: there.flops / max(there.seconds - lost, 0.1 * there.seconds)}
    found: dict[str, float] = {"device.half_work": speed.half_work * rates[short] / speed.rate}
    peak = base.device.peak_16bit
    if not known:
        peak = max(rates[short], product_rate(device, short, sizes[0]))
        found["device.peak_16bit"] = peak
    found["device.efficiency"] = min(1.0, rates[short] / peak)
    # There is one efficiency for both precisions, so the peak of fp32 is chosen to give its measured rate.
    found["device.peak_fp32"] = rates[torch.float32] / found["device.efficiency"]
    found["device.bandwidth"] = sum(UPDATED) * DEVICE_UPDATE_BYTES / _update_seconds(device, short)
    found["device.traffic"] = speed.write_seconds / main.itemsize * found["device.bandwidth"]
    if device.type == "cuda":
        found["device.memory"] = torch.cuda.get_device_properties(device).total_memory
    else:
        found["device.memory"] = facts.usable_memory() / _local_ranks(device)
    return found


def _update_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of one update on the device, as in the runtime: widen gradients, run AdamW, cast parameters."""
    masters = [torch.full((size,), 0.01, device=device) for size in UPDATED]
    parameters = [master.to(dtype) for master in masters]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, foreach=True)

    def update() -> None:
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.to(torch.float32)
        optimizer.step()
        for master, parameter in zip(masters, parameters, strict=True):
            parameter.copy_(master)

    return seconds_of(update, device)


def _measure_host(update: UpdateProbe, busy_host: BusyHost) -> dict[str, float]:
    """The update kernel on the host: on all ranks of a node at once, or next to the thread that drives the device."""
    cpu = torch.device("cpu")
    if _several():
        dist.barrier()
        seconds = settled_seconds_of(update.run, cpu)
    else:
        seconds = statistics.median(busy_host.taken) if busy_host.taken else seconds_of(update.run, cpu)
    return {
        "host.bandwidth": _processes_here() * HOST_PARAMETERS * UPDATE_BYTES / seconds,
        "host.memory": float(facts.usable_memory()),
        "host.sockets": 1,
        "host.cores": _processes_here() * update.threads,
        **(_measure_thread() if update.is_native else {}),
    }


def _measure_thread() -> dict[str, float]:
    """The update kernel on one thread of every rank, with each kind of moments."""
    cpu, found = torch.device("cpu"), {}
    kinds: dict[str, torch.dtype | Literal["8bit"]] = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": "8bit"}
    for key, moments in kinds.items():
        with UpdateProbe(cpu, THREAD_PARAMETERS, moments, threads=1) as alone:
            found[f"host.update_{key}"] = seconds_of(alone.run, cpu) / THREAD_PARAMETERS
    return found


def _measure_copies(device: torch.device) -> dict[str, float]:
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda").fill_(1)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).fill_(1)
    return {
        "pcie.down": COPY_BYTES / seconds_of(lambda: host.copy_(there, non_blocking=True), device),
        "pcie.up": COPY_BYTES / seconds_of(lambda: there.copy_(host, non_blocking=True), device),
    }


def _measure_links(device: torch.device) -> dict[str, float]:
    """A small and a large all-reduce: they give the latency of a step and the bandwidth of a ring."""
    if not _several():
        return {}
    world, local = dist.get_world_size(), _processes_here()
    found: dict[str, float] = {}
    if local > 1:
        groups = [list(range(first, first + local)) for first in range(0, world, local)]
        here, _ = dist.new_subgroups_by_enumeration(groups)
        latency, bandwidth = _ring(device, here, local)
        found |= {"inside.latency": latency, "inside.bandwidth": bandwidth}
    if world > local:
        steps = world // local - 1
        latency, bandwidth = _ring(device, None, world)
        # The time inside nodes is short; all of the ring's time counts for the links between nodes.
        found |= {"between.latency": latency * (world - 1) / steps, "between.bandwidth": bandwidth}
    return found


def _ring(device: torch.device, group: Any, ranks: int) -> tuple[float, float]:
    def all_reduce(size: int) -> float:
        message = torch.ones(size, dtype=torch.uint8, device=device).view(torch.float32)
        # Every rank repeats it as often, so this is not ``seconds_of``.
        taken = [seconds_once(lambda: dist.all_reduce(message, group=group), device) for _ in range(8)]
        return statistics.median(taken[2:])

    small, large = all_reduce(16), all_reduce(MESSAGE_BYTES)
    moved = 2 * MESSAGE_BYTES * (ranks - 1) / ranks
    return small / 2 / (ranks - 1), moved / max(large - small, 1e-9)


def this_device() -> torch.device:
    """The GPU of this rank, or the CPU if there is no GPU."""
    return facts.device_of_rank(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _local_ranks(device: torch.device) -> int:
    """The devices of this node; without GPUs, its ranks."""
    return torch.cuda.device_count() if device.type == "cuda" else _processes_here()


def _processes_here() -> int:
    """The ranks of this node that are running."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _several() -> bool:
    """True if other ranks measure together with this rank."""
    return dist.is_initialized() and dist.get_world_size() > 1


def _of_first_rank(value: tuple[dict[str, float], float], device: torch.device) -> tuple[dict[str, float], float]:
    if not _several():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=device)
    return box[0]


# -- the profile --------------------------------------------------------------------------------------------------


def with_values(machine: Machine, values: dict[str, float]) -> Machine:
    """A profile in which some values, given by their keys, are replaced.

    >>> with_values(load("h200"), {"pcie.up": 50e9}).pcie.up
    50000000000.0
    """
    for key, value in values.items():
        table, name = key.split(".")
        part = getattr(machine, table)
        machine = replace(machine, **{table: replace(part, **{name: value})})
    return machine


def toml(calibration: Calibration) -> str:
    """The profile as the text of a TOML file. A comment says where each number comes from."""
    machine = calibration.machine
    lines = [
        f"# Measured in {calibration.seconds:.0f} s with torch {torch.__version__}.",
        f'title = "{machine.title.replace(chr(34), "")}"',
        f"devices_per_node = {machine.devices_per_node}",
        f'half = "{machine.half}"',
        f"accelerator = {str(machine.accelerator).lower()}",
    ]
    for table in ("device", "inside", "between", "pcie", "host", "launch"):
        lines += ["", f"[{table}]"]
        for key, value in asdict(getattr(machine, table)).items():
            measured = f"{table}.{key}" in calibration.measured
            source = "measured" if measured else f"taken from {calibration.base!r}"
            number = str(value) if isinstance(value, int) else f"{value:.4e}"
            lines.append(f"{key} = {number}  # {source}")
    return "\n".join(lines) + "\n"


def write(calibration: Calibration, path: str | Path) -> Path:
    """Writes the profile into a file. With several ranks, only the first rank writes."""
    path = Path(path)
    if path.suffix != ".toml":
        raise ValueError(f"a machine profile's name ends in .toml, not {path.name!r}")
    if not dist.is_initialized() or dist.get_rank() == 0:
        path.write_text(toml(calibration))
    return path
