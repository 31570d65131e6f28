"""Measures this machine in under a minute, for a profile of its own.

    calibration = calibrate()
    write(calibration, "mine.toml")         # for `zeroshard plan --machine mine.toml`

Speed by size of blocks and of plain products, memory, the host's update, PCIe where there is a GPU, and collectives
where several ranks run (all of them call it together). What cannot be measured here is kept from the nearest profile,
and said so in the file.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..plan.machine_profile import DEVICE_UPDATE_BYTES, Machine, load
from ..system import machine as facts
from .block_speed import CPU_SIZES, GPU_SIZES, OTHER_PRECISION_SIZES, fit, pass_through, product_rate
from .launch_time import launch_seconds
from .stopwatch import seconds_of, settled_seconds_of
from .update_probe import BYTES as UPDATE_BYTES
from .update_probe import BusyHost, UpdateProbe

HOST_PARAMETERS = 48 << 20
"""Updated at a time, 0.7 GB of states: more than a cache holds."""
COPY_BYTES = 256 << 20
MESSAGE_BYTES = 64 << 20


UPDATED = (8 << 20,) * 8
"""Elements of the parameters that one update takes."""


@dataclass(frozen=True)
class Calibration:
    """A profile, and what of it was measured."""

    machine: Machine
    base: str
    """The profile that the rest is kept from."""
    measured: frozenset[str]
    """Keys, as they stand in a profile: ``device.bandwidth``."""
    seconds: float
    """What it took."""


def calibrate(device: torch.device | None = None) -> Calibration:
    """Measures; with several ranks, all call it and all get the first one's result."""
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
        if device.type == "cuda" and not _several():  # among others it would be their collectives that are timed
            found |= launch_seconds(device, busy_host)
        found |= _measure_host(update, busy_host)
    found |= _measure_copies(device)
    found |= _measure_links(device)
    shared = _of_first_rank((found, time.perf_counter() - begin), device)
    return Calibration(with_values(base, shared[0]), _base_name(device), frozenset(shared[0]), shared[1])


def nearest_profile(device: torch.device) -> tuple[Machine, bool]:
    """The profile to start from, and whether it is this very device's."""
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
    # How speed grows with size is taken from the precision that such a device mostly trains in, for both.
    main, other = (torch.float32, short) if device.type == "cpu" else (short, torch.float32)
    speed = fit([pass_through(device, main, size) for size in sizes])
    there = pass_through(device, other, OTHER_PRECISION_SIZES[device.type])
    # What small products lose takes as long in both, what is written as many times as long as it is wider.
    writing = speed.write_seconds * other.itemsize / main.itemsize
    lost = speed.half_work / speed.rate * there.flops / there.size.work + writing * there.written
    rates = {main: speed.rate, other: there.flops / max(there.seconds - lost, 0.1 * there.seconds)}
    found: dict[str, float] = {"device.half_work": speed.half_work * rates[short] / speed.rate}
    peak = base.device.peak_16bit
    if not known:
        peak = max(rates[short], product_rate(device, short, sizes[0]))
        found["device.peak_16bit"] = peak
    found["device.efficiency"] = min(1.0, rates[short] / peak)
    # One efficiency serves both precisions, so that this one's peak is what gives its measured rate.
    found["device.peak_fp32"] = rates[torch.float32] / found["device.efficiency"]
    found["device.bandwidth"] = sum(UPDATED) * DEVICE_UPDATE_BYTES / _update_seconds(device, short)
    found["device.traffic"] = speed.write_seconds / main.itemsize * found["device.bandwidth"]
    if device.type == "cuda":
        found["device.memory"] = torch.cuda.get_device_properties(device).total_memory
    else:
        found["device.memory"] = facts.usable_memory() / _local_ranks(device)
    return found


def _update_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """Of one update on the device as the runtime has it: gradients widened, AdamW on masters, parameters cast back."""
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
    """Through the kernel that updates; all ranks of a node at once, and beside a device's thread if there is one."""
    cpu = torch.device("cpu")
    if _several():
        dist.barrier()
        seconds = settled_seconds_of(update.run, cpu)
    else:
        seconds = statistics.median(busy_host.taken) if busy_host.taken else seconds_of(update.run, cpu)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {
        "host.bandwidth": ranks * HOST_PARAMETERS * UPDATE_BYTES / seconds,
        "host.memory": float(facts.usable_memory()),
        "host.sockets": 1,
    }


def _measure_copies(device: torch.device) -> dict[str, float]:
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda").fill_(1)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).fill_(1)
    return {
        "pcie.down": COPY_BYTES / seconds_of(lambda: host.copy_(there, non_blocking=True), device),
        "pcie.up": COPY_BYTES / seconds_of(lambda: there.copy_(host, non_blocking=True), device),
    }


def _measure_links(device: torch.device) -> dict[str, float]:
    """All-reduces of next to nothing and of much: latency of a step and bandwidth of a ring."""
    if not _several():
        return {}
    world, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found: dict[str, float] = {}
    if local > 1:
        groups = [list(range(first, first + local)) for first in range(0, world, local)]
        here, _ = dist.new_subgroups_by_enumeration(groups)
        latency, bandwidth = _ring(device, here, local)
        found |= {"inside.latency": latency, "inside.bandwidth": bandwidth}
    if world > local:
        steps = world // local - 1
        latency, bandwidth = _ring(device, None, world)
        # What is spent inside the nodes of such a ring is little; all of it is laid to the links between them.
        found |= {"between.latency": latency * (world - 1) / steps, "between.bandwidth": bandwidth}
    return found


def _ring(device: torch.device, group: Any, ranks: int) -> tuple[float, float]:
    def all_reduce(size: int) -> float:
        message = torch.ones(size, dtype=torch.uint8, device=device).view(torch.float32)
        taken: list[float] = []
        for _ in range(8):  # as often on every rank
            begin = time.perf_counter()
            dist.all_reduce(message, group=group)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken[2:])

    small, large = all_reduce(16), all_reduce(MESSAGE_BYTES)
    moved = 2 * MESSAGE_BYTES * (ranks - 1) / ranks
    return small / 2 / (ranks - 1), moved / max(large - small, 1e-9)


def this_device() -> torch.device:
    """The GPU of this rank, if there is one."""
    return facts.device_of_rank(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _local_ranks(device: torch.device) -> int:
    """Devices of this node."""
    if device.type == "cuda":
        return torch.cuda.device_count()
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _several() -> bool:
    """Whether other ranks measure with this one."""
    return dist.is_initialized() and dist.get_world_size() > 1


def _of_first_rank(value: tuple[dict[str, float], float], device: torch.device) -> tuple[dict[str, float], float]:
    if not _several():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=device)
    return box[0]


# -- the profile --------------------------------------------------------------------------------------------------


def with_values(machine: Machine, values: dict[str, float]) -> Machine:
    """A profile with some values replaced, by their keys.

    >>> with_values(load("h200"), {"pcie.up": 50e9}).pcie.up
    50000000000.0
    """
    for key, value in values.items():
        table, name = key.split(".")
        part = getattr(machine, table)
        machine = replace(machine, **{table: replace(part, **{name: value})})
    return machine


def toml(calibration: Calibration) -> str:
    """The profile as a file, with where each number comes from."""
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
            kept = f"kept from {calibration.base!r}"
            source = "measured" if f"{table}.{key}" in calibration.measured else kept
            number = str(value) if isinstance(value, int) else f"{value:.4e}"
            lines.append(f"{key} = {number}  # {source}")
    return "\n".join(lines) + "\n"


def write(calibration: Calibration, path: str | Path) -> Path:
    """Writes the profile; with several ranks, the first does."""
    path = Path(path)
    if path.suffix != ".toml":
        raise ValueError(f"a machine profile's name ends in .toml, not {path.name!r}")
    if not dist.is_initialized() or dist.get_rank() == 0:
        path.write_text(toml(calibration))
    return path
