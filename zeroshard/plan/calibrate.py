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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import machine as facts
from ..offload.arena import Arena
from ..offload.kernel import AdamRule, Pool, Segment
from ..offload.pipeline import default_threads
from ..train.gpt import Block, ModelConfig
from .launching import launch_seconds
from .machine_profile import DEVICE_UPDATE_BYTES, Machine, load

SECONDS = 0.4
"""Each measurement repeats for so long, at least three times."""
HOST_PARAMETERS = 48 << 20
"""Updated at a time, 0.7 GB of states: more than a cache holds."""
COPY_BYTES = 256 << 20
MESSAGE_BYTES = 64 << 20
RULE = AdamRule(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, maximize=False, step=100)


class Size(NamedTuple):
    """Of a transformer block, and of what goes through it."""

    hidden: int
    tokens: int

    @property
    def work(self) -> float:
        """As ``Device.rate`` takes it."""
        return float(self.tokens * self.hidden**2)


GPU_SIZES = (Size(1024, 2048), Size(2048, 4096), Size(4096, 4096), Size(4096, 16384))
CPU_SIZES = (Size(128, 256), Size(256, 512), Size(512, 1024), Size(1024, 1024))
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
    if device.type == "cuda":
        found |= launch_seconds(device)
    found |= _measure_host(device)
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

    def once() -> float:
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    once()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < SECONDS:
        taken.append(once())
    return min(taken)


def fit(works: Sequence[float], rates: Sequence[float]) -> tuple[float, float]:
    """The rate that work tends to, and the work that reaches half of it.

    The half is looked for among powers of 1.1 up to half of the largest work, so that noise cannot extrapolate far, by
    the least squares of relative errors.

    >>> rate, half = fit([1e6, 1e7, 1e8], [50e9, 91e9, 99e9])
    >>> round(rate / 1e10), round(half / 1e6, 1)
    (10, 1.0)
    """
    best = (math.inf, max(rates), 0.0)
    half = min(works) / 1000
    while half <= max(works) / 2:
        logs = [math.log(rate * (work + half) / work) for work, rate in zip(works, rates, strict=True)]
        middle = statistics.mean(logs)
        best = min(best, (sum((value - middle) ** 2 for value in logs), math.exp(middle), half))
        half *= 1.1
    return best[1], best[2]


def block_rates(device: torch.device, dtype: torch.dtype, sizes: Sequence[Size]) -> Iterator[float]:
    """FLOPs a second of forward and backward through blocks of a GPT, everything in them included."""
    cuda = device.type == "cuda"
    depth, sequence = (GPU_DEPTH, GPU_SEQUENCE) if cuda else (1, CPU_SEQUENCE)
    for size in sizes:
        config = ModelConfig(layers=depth, hidden=size.hidden, heads=max(1, size.hidden // 64), sequence=sequence)
        blocks = nn.Sequential(*(Block(config) for _ in range(depth))).to(device, dtype)
        shape = (max(1, size.tokens // sequence), sequence, size.hidden)
        tokens = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
        wanted = [tokens, *blocks.parameters()]

        def pass_through(blocks: nn.Module = blocks, tokens: Tensor = tokens, wanted: list[Tensor] = wanted) -> None:
            torch.autograd.grad(blocks(tokens).sum(), wanted)

        forward = depth * (24 * size.work + 4 * size.tokens * sequence * size.hidden)
        yield 3 * forward / seconds_of(graphed(pass_through) if cuda else pass_through, device)


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
    works = [size.work for size in sizes]
    short = torch.bfloat16 if device.type == "cpu" or torch.cuda.is_bf16_supported() else torch.float16
    # How speed grows with size is taken from the precision that such a device mostly trains in, for both.
    main, other = (torch.float32, short) if device.type == "cpu" else (short, torch.float32)
    fastest, half_work = fit(works, list(block_rates(device, main, sizes)))
    largest = next(iter(block_rates(device, other, sizes[-1:])))
    # What small products lose takes as long in both.
    lost = half_work / fastest / works[-1]
    rates = {main: fastest, other: 1 / max(1 / largest - lost, 0.1 / largest)}
    found: dict[str, float] = {"device.half_work": half_work * rates[short] / fastest}
    peak = base.device.peak_16bit
    if not known:
        peak = max(rates[short], product_rate(device, short, sizes[-1]))
        found["device.peak_16bit"] = peak
    found["device.efficiency"] = min(1.0, rates[short] / peak)
    # One efficiency serves both precisions, so that this one's peak is what gives its measured rate.
    found["device.peak_fp32"] = rates[torch.float32] / found["device.efficiency"]
    found["device.bandwidth"] = sum(UPDATED) * DEVICE_UPDATE_BYTES / _update_seconds(device, short)
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


def _measure_host(device: torch.device) -> dict[str, float]:
    """Through the kernel that updates, 28 bytes a parameter; all ranks of a node at once."""
    arena = Arena(14 * HOST_PARAMETERS, pinned=False)  # the memory that states live in
    gradient = arena.take(HOST_PARAMETERS, torch.bfloat16).fill_(0.01)
    master, first, second = (arena.take(HOST_PARAMETERS, torch.float32).fill_(0.01) for _ in range(3))
    segment = Segment(
        gradient=gradient, master=master, parameter=gradient, moments=(first, second), rule=None, key=0, start=0
    )
    pool = Pool(default_threads(device))
    try:
        batch = pool.prepare([segment])
        seconds = seconds_of(lambda: batch.run([RULE], 1.0), torch.device("cpu"))
    finally:
        pool.close()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {
        "host.bandwidth": ranks * HOST_PARAMETERS * 28 / seconds,
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
