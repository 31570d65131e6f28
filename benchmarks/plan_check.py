"""Plan against reality: memory, volume and step time of many configurations, and whether the recommended is fastest.

    PYTHONPATH=. python benchmarks/plan_check.py [--profile mine.toml] [--out FILE] [--device cpu]

On a GPU every configuration runs for real, alone or as one rank of a fake world (whose collectives move nothing and
take no time: the plan's links are then infinitely fast). Model states are the storages of live tensors between backward
and step, peaks are torch's ``max_memory_allocated``, volume is counted at the dispatcher, steps are timed from one to
the next, all configurations in turn and twice. Nothing is read from the runtime's own ledger. Without a GPU, small
models: states from live tensors, peaks from runs without values, no times.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard
from zeroshard import compat
from zeroshard.offload.options import Offload
from zeroshard.plan import calibrate
from zeroshard.plan.choice import Row, Variant, recommend
from zeroshard.plan.dryrun import dry_run
from zeroshard.plan.hardware import Hardware
from zeroshard.plan.machine_profile import Link, Machine, load
from zeroshard.plan.models import from_config
from zeroshard.plan.shape import Setup
from zeroshard.train.gpt import GPT, ModelConfig

BF16 = torch.bfloat16
STATES, PEAK, TIME, FASTEST = 0.01, 0.10, 0.20, 0.10
"""How far a plan may be off, and how much slower than the fastest the recommended one may be."""
ENOUGH = 0.8
"""Share of the cases in which it must not be."""
NOTHING = 1 << 16
"""Bytes by which a plan may be off anyway: where no states are planned, the scalar behind placeholders is there."""
WARM, TIMED = 3, 6
"""Steps. The first two learn the order of units and make the optimizer's states."""
ROUNDS = 2
"""How often each is timed, all in turn: the thread that drives a device is not equally quick every minute."""
WAYS: dict[str, Offload | None] = {
    "none": None,
    "cpu": Offload(),
    "cpu, 16-bit states": Offload(moments=BF16),
    "cpu, small": Offload(moments=BF16, split_master=True, read_back=True, update_in_backward=True),
    "cpu, half": Offload(host_fraction=0.5),
    "cpu, delayed": Offload(delayed_update_after=1),
    "cpu, parameters too": Offload(parameters="cpu"),
}
RECOMMENDED = ("none", "cpu", "cpu, 16-bit states", "cpu, small", "cpu, parameters too")
"""Those that `zeroshard plan` has a row for."""


@dataclass(frozen=True)
class Job:
    """A model, and what goes through it."""

    name: str
    config: ModelConfig
    batch: int


@dataclass(frozen=True)
class Case:
    """One configuration."""

    job: Job
    world: int
    stage: int
    way: str = "none"
    precision: str = "bf16"

    @property
    def offload(self) -> Offload | None:
        return WAYS[self.way]

    @property
    def setup(self) -> Setup:
        return Setup(
            stage=self.stage,
            world=self.world,
            offload=self.offload,
            precision=self.precision,  # type: ignore[arg-type]
            batch=self.job.batch,
            sequence=self.job.config.sequence,
            checkpointing=self.job.config.checkpointing,
        )

    @property
    def group(self) -> tuple[str, int, int, str]:
        return self.job.name, self.job.batch, self.world, self.precision


def jobs(on_gpu: bool) -> dict[str, Job]:
    """Small ones, so that many fit in minutes; without a GPU tiny ones."""

    def job(name: str, layers: int, hidden: int, heads: int, batch: int, **more: Any) -> Job:
        shape: dict[str, Any] = {"sequence": 1024, "vocabulary": 50304, "checkpointing": True}
        if not on_gpu:
            shape |= {"sequence": 64, "vocabulary": 1000}
            layers, hidden, heads = max(2, layers // 4), hidden // 8, max(1, heads // 4)
        return Job(name, ModelConfig(layers=layers, hidden=hidden, heads=heads, **{**shape, **more}), batch)

    return {
        "124M": job("124M", 12, 768, 12, 8),
        "124M, all kept": job("124M, all kept", 12, 768, 12, 8, checkpointing=False),
        "355M": job("355M", 24, 1024, 16, 4),
        "355M, more": job("355M", 24, 1024, 16, 16),
        "774M": job("774M", 36, 1280, 20, 8),
        "1.5B": job("1.5B", 48, 1600, 25, 8),
    }


def cases(on_gpu: bool) -> list[Case]:
    """Stages × offload × precision × sizes."""
    known = jobs(on_gpu)
    found = [Case(known["124M"], 1, 0, way) for way in ("none", "cpu", "cpu, 16-bit states", "cpu, small")]
    found += [Case(known["355M"], 1, 0, way) for way in ("none", "cpu", "cpu, 16-bit states", "cpu, small")]
    found += [Case(known["355M, more"], 1, 0, way) for way in ("none", "cpu", "cpu, 16-bit states", "cpu, small")]
    found += [Case(known[name], 1, 3, "cpu, parameters too") for name in ("124M", "355M", "355M, more")]
    found += [Case(known["124M"], 1, 0, way) for way in ("cpu, half", "cpu, delayed")]
    found += [Case(known["124M"], 1, 0, "none", "fp32"), Case(known["124M"], 1, 2, "cpu", "fp32")]
    found += [Case(known["124M, all kept"], 1, 0), Case(known["774M"], 1, 0)]
    found += [Case(known["355M"], 8, stage) for stage in range(4)]
    found += [Case(known["355M"], 8, stage, "cpu") for stage in (2, 3)]
    found += [Case(known["124M"], 8, stage, "none", "fp32") for stage in (2, 3)]
    found += [Case(known["124M"], 8, 2, "none", "fp16"), Case(known["124M, all kept"], 8, 3)]
    found += [Case(known["774M"], 64, stage) for stage in (1, 2, 3)]
    found += [Case(known["1.5B"], 1, 0, way) for way in ("none", "cpu", "cpu, 16-bit states", "cpu, small")]
    found += [Case(known["1.5B"], 64, stage) for stage in (2, 3)]
    return found


# -- measuring ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What a run had; bytes, elements, seconds."""

    states: int
    host: int | None
    """None where there is no device beside the host: it is then counted with the states."""
    peak: int
    volume: int
    seconds: float | None = None


class Volume(TorchDispatchMode):
    """Elements of parameters and gradients that collectives are asked to move, seen where torch dispatches them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [tensor for tensor in _tensors(args) if tensor.dtype is self._dtype and tensor.numel() > 1]
            if tensors:
                twice = 2 if "allreduce" in str(func) else 1
                self.elements += twice * max(tensor.numel() for tensor in tensors)
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)


def live(device: torch.device) -> dict[int, int]:
    """Storages of live tensors on a device, asked from the garbage collector."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.device.type == device.type and not compat.is_fake(thing):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


@contextmanager
def ranks(world: int) -> Iterator[None]:
    """One rank of a fake world, or nobody but this process."""
    with compat.one_rank_of(world, 0) if world > 1 else nullcontext():
        yield


class Run:
    """One configuration under way."""

    def __init__(self, case: Case, device: torch.device, *, empty: bool = True, **offload: Any) -> None:
        """``empty``: of zeros, which start the sooner; but a device is quicker to multiply them, so not for times."""
        self.device, config = device, case.job.config
        options = None if case.offload is None else replace(case.offload, **offload)
        with torch.device("meta"):
            model = GPT(config)
        self.model, self.optimizer = zeroshard.shard(
            model,
            torch.optim.AdamW(model.parameters(), foreach=True),
            stage=case.stage,
            precision=case.precision,
            offload=options,
            init="empty" if empty else None,
            device=device,
        )
        shape = (case.job.batch, config.sequence)
        self.tokens = torch.randint(config.vocabulary, shape, device=device)

    def backward(self) -> None:
        self.model(self.tokens, self.tokens).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> None:
        """Until neither host nor device has anything to do."""
        zeroshard.synchronize(self.model)
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(case: Case, device: torch.device) -> Measured:
    """Runs a configuration step by step, for memory and volume."""
    cuda, cpu = device.type == "cuda", torch.device("cpu")
    _clean()
    before, before_host = live(device), live(cpu)
    allocated = torch.cuda.memory_allocated() if cuda else 0
    with ranks(case.world):
        run = Run(case, device, blocking=True)
        for _ in range(WARM):
            run.settle()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            run.backward()
            run.step()
            run.settle()
        peak = torch.cuda.max_memory_allocated() - allocated if cuda else 0
        with Volume(_dtype(case)) as volume:
            run.backward()
            run.step()
            run.settle()
        run.backward()
        if case.offload is None or not case.offload.update_in_backward:
            run.optimizer.clip_grad_norm_(1e9)  # settles reduces under way
        run.settle()
        states = _new(before, live(device)) - run.tokens.nbytes
        host = _new(before_host, live(cpu)) if cuda else None
        run.step()
        run.settle()
        del run
    _clean()
    return Measured(states, host, peak if cuda else _peak_without_values(case), volume.elements)


def seconds_of_a_step(case: Case, device: torch.device) -> float:
    """Runs a configuration freely, from one point of a step to the same: what one leaves to the next is paid for."""
    _clean()
    with ranks(case.world):
        run = Run(case, device, empty=False)
        for _ in range(WARM):
            run.backward()
            run.step()
        marks = []
        for number in range(TIMED + 1):
            run.backward()
            if number in (0, TIMED):
                torch.cuda.synchronize()
                marks.append(time.perf_counter())
            run.step()
        run.settle()
        del run
    _clean()
    return (marks[-1] - marks[0]) / TIMED


def _peak_without_values(case: Case) -> int:
    shape = (case.job.batch, case.job.config.sequence)

    def loss(model: nn.Module) -> Tensor:
        tokens = torch.zeros(shape, dtype=torch.long)
        output: Tensor = model(tokens, tokens)
        return output

    return dry_run(
        lambda: GPT(case.job.config),
        lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
        loss,
        world=case.world,
        real=False,
        stage=case.stage,
        precision=case.precision,
        offload=case.offload,
    ).peak


def _new(before: dict[int, int], after: dict[int, int]) -> int:
    return sum(size for pointer, size in after.items() if pointer not in before)


def _dtype(case: Case) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case.precision]


def _clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


# -- comparing ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """A configuration as it was planned and as it was."""

    case: Case
    row: Row
    measured: Measured

    @cached_property
    def planned(self) -> Measured:
        needs, volume = self.row.budget, self.row.volume
        together = self.row.hardware.on_cpu
        states = needs.at_step.model_states + (needs.host.total if together else 0)
        host = needs.host.total if needs.host.total and not together else None
        seconds = None if self.row.time is None else self.row.time.total
        return Measured(states, host, needs.peak.total, volume.elements, seconds)

    def error(self, name: str) -> float | None:
        planned, measured = getattr(self.planned, name), getattr(self.measured, name)
        if planned is None or measured is None:
            return None
        if name != "seconds" and abs(planned - measured) < NOTHING:
            return 0.0
        return float(planned / measured - 1) if measured else math.inf


@dataclass(frozen=True)
class Recommendation:
    """What was recommended for a memory, beside the fastest that fitted it."""

    group: tuple[str, int, int, str]
    cap: float
    recommended: str
    seconds: float | None
    fastest: str
    fastest_seconds: float

    @property
    def good(self) -> bool:
        return self.seconds is not None and self.seconds <= (1 + FASTEST) * self.fastest_seconds


def hardware(case: Case, device: torch.device, machine: Machine | None, memory: float = math.inf) -> Hardware:
    """One rank of a world whose links take no time; its host is its own."""
    if machine is not None:
        free = Link(latency=0.0, bandwidth=math.inf)
        machine = replace(machine, devices_per_node=1, inside=free, between=free)
    return Hardware(case.world, case.world, memory, math.inf, machine, on_cpu=device.type == "cpu", taken=0.0)


def recommendations(found: Sequence[Compared]) -> list[Recommendation]:
    """For each job that several configurations were measured of: what is recommended for devices of some sizes."""
    groups: dict[tuple[str, int, int, str], list[Compared]] = {}
    for one in found:
        if one.case.way in RECOMMENDED:
            groups.setdefault(one.case.group, []).append(one)
    answers = []
    for group, members in groups.items():
        if len(members) < 4:
            continue
        peaks = sorted({one.row.budget.peak.total for one in members})
        caps = [1.2 * peaks[-1], 1.02 * (peaks[-1] + peaks[0]) / 2, 1.06 * peaks[0] / 0.96]
        for cap in caps:
            rows = {id(one): replace(one.row, hardware=replace(one.row.hardware, device_memory=cap)) for one in members}
            best = recommend(list(rows.values()))
            fitting = [one for one in members if one.measured.peak <= cap and one.measured.seconds is not None]
            if best is None or not fitting:
                continue
            fastest = min(fitting, key=lambda one: one.measured.seconds or math.inf)
            taken = next(one for one in members if rows[id(one)] is best)
            seconds = taken.measured.seconds if taken.measured.peak <= cap else None
            assert fastest.measured.seconds is not None
            answers.append(
                Recommendation(group, cap, _name(taken.case), seconds, _name(fastest.case), fastest.measured.seconds)
            )
    return answers


def _name(case: Case) -> str:
    return f"stage {case.stage}, {case.way}"


# -- telling ------------------------------------------------------------------------------------------------------


def verdicts(found: Sequence[Compared], advised: Sequence[Recommendation]) -> dict[str, tuple[bool, str]]:
    """By criterion, whether it held and how far it was off at most."""
    told: dict[str, tuple[bool, str]] = {}
    for name, most in (("states", STATES), ("host", STATES), ("peak", PEAK), ("seconds", TIME)):
        errors = [abs(error) for one in found if (error := one.error(name)) is not None]
        if errors:
            within = sum(error <= most for error in errors)
            text = f"{within} of {len(errors)} within {most:.0%}, mean {sum(errors) / len(errors):.1%}, "
            told[name] = within == len(errors), text + f"most {max(errors):.1%}"
    exact = sum(one.planned.volume == one.measured.volume for one in found)
    told["volume"] = exact == len(found), f"{exact} of {len(found)} exact"
    if advised:
        good = sum(one.good for one in advised)
        told["recommended"] = good >= ENOUGH * len(advised), f"{good} of {len(advised)} within {FASTEST:.0%} of fastest"
    return told


def show(found: Sequence[Compared], advised: Sequence[Recommendation], console: Console) -> None:
    """Prints one table of all cases, one of what was recommended, and the verdicts."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for title in ("model", "batch", "world", "stage", "offload", "precision"):
        table.add_column(title, justify="right" if title in ("batch", "world", "stage") else "left", no_wrap=True)
    for title in ("states MB", "", "host MB", "", "peak MB", "", "volume", "step ms", ""):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found:
        case, seen = one.case, one.measured
        table.add_row(
            case.job.name, str(case.job.batch), str(case.world), str(case.stage), case.way, case.precision,
            f"{seen.states / 1e6:,.1f}", _percent(one.error("states")),
            "" if one.error("host") is None else f"{(seen.host or 0) / 1e6:,.1f}", _percent(one.error("host")),
            f"{seen.peak / 1e6:,.1f}", _percent(one.error("peak")),
            "exact" if one.planned.volume == seen.volume else f"{one.planned.volume} / {seen.volume}",
            "" if seen.seconds is None else f"{1e3 * seen.seconds:.1f}", _percent(one.error("seconds")),
        )  # fmt: skip
    console.print("measured, and how far the plan is off")
    console.print(table)
    if advised:
        table = Table(box=None, pad_edge=False, padding=(0, 1))
        for title in ("model", "batch", "world", "device GB", "recommended", "ms", "fastest that fits", "ms", ""):
            table.add_column(title, no_wrap=True)
        for answer in advised:
            name, batch, world, _ = answer.group
            table.add_row(
                name, str(batch), str(world), f"{answer.cap / 1e9:.2f}", answer.recommended,
                "too large" if answer.seconds is None else f"{1e3 * answer.seconds:.1f}",
                answer.fastest, f"{1e3 * answer.fastest_seconds:.1f}", "" if answer.good else "missed",
            )  # fmt: skip
        console.print(table)
    for name, (held, text) in verdicts(found, advised).items():
        console.print(f"{'holds' if held else 'FAILS'}  {name}: {text}", highlight=False)


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"


def as_json(found: Sequence[Compared], advised: Sequence[Recommendation], spent: float) -> dict[str, Any]:
    """All numbers."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "seconds": spent,
        "cases": [
            {
                "job": one.case.job.name,
                "batch": one.case.job.batch,
                "world": one.case.world,
                "stage": one.case.stage,
                "offload": one.case.way,
                "precision": one.case.precision,
                "planned": asdict(one.planned),
                "measured": asdict(one.measured),
            }
            for one in found
        ],
        "recommendations": [asdict(answer) | {"good": answer.good} for answer in advised],
        "verdicts": {name: {"held": held, "text": text} for name, (held, text) in verdicts(found, advised).items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, compares, prints; 1 if a bound was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default the GPU, if there is one")
    parser.add_argument("--profile", type=Path, help="a calibrated profile; without one this machine is measured first")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose model, offload or precision has it")
    parser.add_argument("--out", type=Path, help="write all numbers here, as JSON")
    given = parser.parse_args(arguments)
    begin = time.perf_counter()
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    machine = None
    if device.type == "cuda":
        machine = load(given.profile) if given.profile is not None else calibrate.calibrate(device).machine
    wanted = [
        case for case in cases(device.type == "cuda") if given.only in f"{case.job.name} {case.way} {case.precision}"
    ]
    rounds = ROUNDS if device.type == "cuda" else 0

    def told(what: str, number: int) -> None:
        spent = time.perf_counter() - begin
        print(f"\r{what} {number} of {len(wanted)}, {spent:.0f} s ", end="", file=sys.stderr, flush=True)

    taken: dict[Case, list[float]] = {case: [] for case in wanted}
    for turn in range(rounds):
        for number, case in enumerate(wanted, 1):
            taken[case].append(seconds_of_a_step(case, device))
            told(f"timed ({turn + 1} of {rounds})", number)
    found = []
    for number, case in enumerate(wanted, 1):
        variant, place = Variant(case.way, case.offload), hardware(case, device, machine)
        row = Row(variant, from_config(case.job.config), case.setup, place)
        seconds = statistics.mean(taken[case]) if rounds else None
        found.append(Compared(case, row, replace(measure(case, device), seconds=seconds)))
        told("measured", number)
    print(file=sys.stderr)
    advised = recommendations(found)
    show(found, advised, Console() if sys.stdout.isatty() else Console(width=170))
    if given.out is not None:
        given.out.write_text(json.dumps(as_json(found, advised, time.perf_counter() - begin), indent=2))
    return 0 if all(held for held, _ in verdicts(found, advised).values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
