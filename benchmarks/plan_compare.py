"""What was planned beside what was measured: errors, verdicts, and whether the recommended is the fastest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.plan_cases import Case, Measured
from zeroshard.plan.advice import Row, Variant, recommend
from zeroshard.plan.machine.hardware import Hardware
from zeroshard.plan.machine.profile import Link, Machine
from zeroshard.plan.model.gpt import from_config

STATES, PEAK, TIME, FASTEST = 0.01, 0.10, 0.20, 0.10
"""How far a plan may be off, and how much slower than the fastest the recommended one may be."""
ENOUGH = 0.8
"""Share of the cases in which it must not be."""
NOTHING = 1 << 16
"""Bytes by which a plan may be off anyway: where no states are planned, the scalar behind placeholders is there."""
RECOMMENDED = ("none", "cpu", "cpu, 16-bit states", "cpu, small", "cpu, parameters too")
"""Those that `zeroshard plan` has a row for."""


@dataclass(frozen=True, eq=False)
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

    @property
    def peak(self) -> int:
        """As measured, or else as planned."""
        peak = self.planned.peak if self.measured.peak is None else self.measured.peak
        assert peak is not None
        return peak

    @property
    def exact(self) -> bool | None:
        """Whether the volume is as planned."""
        return None if self.measured.volume is None else self.planned.volume == self.measured.volume

    @property
    def in_range(self) -> bool:
        """Whether the time is within the range that the plan gives, where it gives one."""
        span, seconds = self.row.span, self.measured.seconds
        return span is not None and seconds is not None and span[0] < span[1] and span[0] <= seconds <= span[1]

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


def compare(case: Case, measured: Measured, device: torch.device, machine: Machine | None) -> Compared:
    """Plans a configuration that was measured."""
    row = Row(
        Variant(case.way, case.offload), from_config(case.job.config), case.setup, hardware(case, device, machine)
    )
    return Compared(case, row, measured)


def hardware(case: Case, device: torch.device, machine: Machine | None, memory: float = math.inf) -> Hardware:
    """One rank of a world whose links take no time; its host is its own."""
    if machine is not None:
        free = Link(latency=0.0, bandwidth=math.inf)
        machine = replace(machine, devices_per_node=1, inside=free, between=free)
    return Hardware(case.world, case.world, memory, math.inf, machine, on_cpu=device.type == "cpu", reserved=0.0)


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
            fitting = [one for one in members if one.peak <= cap and one.measured.seconds is not None]
            if best is None or not fitting:
                continue
            fastest = min(fitting, key=lambda one: one.measured.seconds or math.inf)
            taken = next(one for one in members if rows[id(one)] is best)
            seconds = taken.measured.seconds if taken.peak <= cap else None
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
        known = {one: abs(error) for one in found if (error := one.error(name)) is not None}
        errors, beyond = known.values(), [one for one, error in known.items() if error > most]
        if errors:
            text = f"{len(errors) - len(beyond)} of {len(errors)} within {most:.0%}, "
            text += f"mean {sum(errors) / len(errors):.1%}, most {max(errors):.1%}"
            if name == "seconds" and beyond:
                explained = [one for one in beyond if one.in_range]
                text += f"; of the other {len(beyond)}, {len(explained)} within the planned range"
                beyond = [one for one in beyond if one not in explained]
            told[name] = not beyond, text
    volumes = [one.exact for one in found if one.exact is not None]
    if volumes:
        told["volume"] = all(volumes), f"{sum(volumes)} of {len(volumes)} exact"
    if advised:
        good = sum(one.good for one in advised)
        told["recommended"] = good >= ENOUGH * len(advised), f"{good} of {len(advised)} within {FASTEST:.0%} of fastest"
    return told


def show(found: Sequence[Compared], advised: Sequence[Recommendation], console: Console) -> None:
    """Prints one table of all cases, one of what was recommended, and the verdicts."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for title in ("model", "batch", "world", "stage", "offload", "precision"):
        table.add_column(title, justify="right" if title in ("batch", "world", "stage") else "left", no_wrap=True)
    for title in ("states MB", "", "host MB", "", "peak MB", "", "volume", "step ms", "", ""):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found:
        case, seen = one.case, one.measured
        table.add_row(
            case.job.name, str(case.job.batch), str(case.world), str(case.stage), case.way, case.precision,
            _mega(seen.states), _percent(one.error("states")),
            "" if one.error("host") is None else _mega(seen.host), _percent(one.error("host")),
            _mega(seen.peak), _percent(one.error("peak")),
            {True: "exact", False: f"{one.planned.volume} / {seen.volume}", None: ""}[one.exact],
            "" if seen.seconds is None else f"{1e3 * seen.seconds:.1f}", _percent(one.error("seconds")),
            "in range" if one.in_range else "",
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


def _mega(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:,.1f}"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"


def as_json(found: Sequence[Compared], advised: Sequence[Recommendation], spent: float) -> dict[str, Any]:
    """All numbers."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "seconds": spent,
        "cases": [
            {
                "name": one.case.name,
                "job": one.case.job.name,
                "batch": one.case.job.batch,
                "world": one.case.world,
                "stage": one.case.stage,
                "offload": one.case.way,
                "precision": one.case.precision,
                "planned": asdict(one.planned),
                "planned_range": one.row.span,
                "measured": asdict(one.measured),
            }
            for one in found
        ],
        "recommendations": [asdict(answer) | {"good": answer.good} for answer in advised],
        "verdicts": {name: {"held": held, "text": text} for name, (held, text) in verdicts(found, advised).items()},
    }
