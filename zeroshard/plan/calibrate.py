"""Measures this machine in under a minute, for a profile of its own.

    calibration = calibrate()
    write(calibration, "mine.toml")         # for `zeroshard plan --machine mine.toml`

Speed by size of blocks and of plain products, memory, the host's update, PCIe where there is a GPU, and collectives
where several ranks run (all of them call it together). What cannot be measured here is kept from the nearest profile,
and said so in the file.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .. import machine as facts
from ..train.gpt import Block, ModelConfig
from .host_update import BYTES as UPDATE_BYTES
from .host_update import HostUpdate, Repeated
from .launching import launch_seconds
from .machine_profile import DEVICE_UPDATE_BYTES, Machine, load
from .shape import Transformer

SECONDS = 0.4
"""Each measurement repeats for so long, at least three times."""
SETTLING_SECONDS = 1.2
HOST_PARAMETERS = 48 << 20
"""Updated at a time, 0.7 GB of states: more than a cache holds."""
COPY_BYTES = 256 << 20
MESSAGE_BYTES = 64 << 20


class Size(NamedTuple):
    """Of a transformer block, and of what goes through it."""

    hidden: int
    tokens: int

    @property
    def work(self) -> float:
        """As ``Device.rate`` takes it."""
        return float(self.tokens * self.hidden**2)


GPU_SIZES = (Size(4096, 16384), Size(1024, 2048), Size(1024, 32768), Size(2048, 8192), Size(4096, 4096))
CPU_SIZES = (Size(1024, 1024), Size(128, 256), Size(256, 512), Size(256, 2048), Size(512, 1024))
OTHER_PRECISION_SIZES = {"cuda": Size(2048, 4096), "cpu": Size(512, 1024)}
GPU_SEQUENCE, CPU_SEQUENCE = 1024, 256
GPU_DEPTH = 4
"""Blocks in a row, as in a training."""
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
    with HostUpdate(device, HOST_PARAMETERS) as update:
        crowd = Repeated(update)
        if device.type == "cuda":
            found |= launch_seconds(device, crowd)
        found |= _measure_host(update, crowd)
    found |= _measure_copies(device)
    found |= _measure_links(device)
    shared = _of_first_rank((found, time.perf_counter() - begin), device)
    return Calibration(with_values(base, shared[0]), _base_name(device), frozenset(shared[0]), shared[1])


def nearest_profile(device: torch.device) -> tuple[Machine, bool]:
    """The profile to start from, and whether it is this very device's."""
    name = _base_name(device)
    known = device.type == "cpu" or name.upper() in torch.cuda.get_device_name(device).upper()
    return load(name), known and device.type == "cuda"


def _base_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    here = torch.cuda.get_device_name(device).upper()
    return next((name for name in ("h200", "h100", "a100", "v100") if name.upper() in here), "a100")


# -- measurements -------------------------------------------------------------------------------------------------


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """The quickest of some repetitions, after one that does not count: what else runs here only adds to them."""
    _seconds_once(work, device)
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < SECONDS:
        taken.append(_seconds_once(work, device))
    return min(taken)


def _seconds_once(work: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


class Pass(NamedTuple):
    """Blocks that were passed through, forward and back, and how long that took."""

    size: Size
    depth: int
    sequence: int
    seconds: float

    @property
    def flops(self) -> float:
        return 3 * self.depth * (24 * self.size.work + 4 * self.size.tokens * self.sequence * self.size.hidden)

    @property
    def written(self) -> float:
        """Activations as the time model counts them: three times what forward writes."""
        block = Transformer(layers=1, hidden=self.size.hidden, heads=1, vocabulary=1).block_written()
        return 3 * self.depth * self.size.tokens * block


class Speed(NamedTuple):
    """Of blocks: what their products tend to, what each of these loses, and what all else takes."""

    rate: float
    """FLOPs a second."""
    half_work: float
    """The work (``Size.work``) that reaches half of it."""
    write_seconds: float
    """For each activation that is written."""


def fit(passes: Sequence[Pass]) -> Speed:
    """The least squares of relative errors; none of the three is negative.

    >>> sizes = [Size(1024, 2048), Size(1024, 16384), Size(4096, 4096), Size(4096, 16384)]
    >>> passes = [Pass(size, 1, 1024, 1.0) for size in sizes]
    >>> passes = [one._replace(seconds=one.flops / 6e14 * (1 + 1e9 / one.size.work)) for one in passes]
    >>> rate, half_work, write_seconds = fit(passes)
    >>> round(rate / 1e12), round(half_work / 1e9, 3), round(write_seconds * 1e15)
    (600, 1.0, 0)
    """
    rows = [[one.flops, one.flops / one.size.work, one.written] for one in passes]
    shares = torch.tensor(rows, dtype=torch.float64) / torch.tensor([[one.seconds] for one in passes])
    best = (math.inf, [0.0, 0.0, 0.0])
    for kept in ([0], [0, 1], [0, 2], [0, 1, 2]):
        scale = shares[:, kept].norm(dim=0)  # their units are far apart
        found = torch.linalg.lstsq(shares[:, kept] / scale, torch.ones(len(passes), 1, dtype=torch.float64)).solution
        values = dict(zip(kept, (found[:, 0] / scale).tolist(), strict=True))
        if min(values.values()) >= 0:
            error = float((shares[:, kept] / scale @ found - 1).square().sum())
            best = min(best, (error, [values.get(column, 0.0) for column in range(3)]))
    a_flop, a_product, a_write = best[1]
    return Speed(1 / a_flop, max(a_product / a_flop, 1.0), a_write)


def pass_through(device: torch.device, dtype: torch.dtype, size: Size) -> Pass:
    """Measures blocks of a GPT, everything in them included."""
    cuda = device.type == "cuda"
    depth, sequence = (GPU_DEPTH, GPU_SEQUENCE) if cuda else (1, CPU_SEQUENCE)
    config = ModelConfig(layers=depth, hidden=size.hidden, heads=max(1, size.hidden // 64), sequence=sequence)
    blocks = nn.Sequential(*(Block(config) for _ in range(depth))).to(device, dtype)
    shape = (max(1, size.tokens // sequence), sequence, size.hidden)
    tokens = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    wanted, gradient = [tokens, *blocks.parameters()], torch.randn(shape, device=device, dtype=dtype)

    def work() -> None:
        torch.autograd.grad(blocks(tokens), wanted, gradient)

    seconds = settled_seconds_of(graphed(work), device) if cuda else seconds_of(work, device)
    return Pass(size, depth, sequence, seconds)


def settled_seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """What it takes after a while: a GPU at its limit of power slows down within a second, and trains that way."""
    taken: list[float] = []
    while len(taken) < 4 or sum(taken) < SETTLING_SECONDS:
        taken.append(_seconds_once(work, device))
    return statistics.median(taken[len(taken) // 2 :])


def graphed(work: Callable[[], object]) -> Callable[[], object]:
    """The same as one CUDA graph: what the device takes, without what it takes to launch kernel by kernel."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # what is made once must not be made while it is captured
        work()
        work()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def product_rate(device: torch.device, dtype: torch.dtype, size: Size) -> float:
    """FLOPs a second of one plain product."""
    left = torch.randn(size.tokens, size.hidden, device=device, dtype=dtype)
    right = torch.randn(size.hidden, 4 * size.hidden, device=device, dtype=dtype)
    return 8 * size.work / seconds_of(lambda: left @ right, device)


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


def _measure_host(update: HostUpdate, crowd: Repeated) -> dict[str, float]:
    """Through the kernel that updates; all ranks of a node at once, and beside a device's thread if there is one."""
    seconds = statistics.median(crowd.taken) if crowd.taken else seconds_of(update.run, torch.device("cpu"))
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
    if not dist.is_initialized() or dist.get_world_size() == 1:
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
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


def _local_ranks(device: torch.device) -> int:
    """Devices of this node."""
    if device.type == "cuda":
        return torch.cuda.device_count()
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _of_first_rank(value: tuple[dict[str, float], float], device: torch.device) -> tuple[dict[str, float], float]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
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
