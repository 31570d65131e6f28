"""The few numbers of a run that stand at the top of its report, and that advice is made from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TypeVar

from .journal import Evaluation, Memory, PlanRow, Run, Step
from .timeline import Window, typical

Entry = TypeVar("Entry", Step, Evaluation)


@dataclass(frozen=True)
class Summary:
    """A run with what follows from its lines."""

    run: Run

    @cached_property
    def window(self) -> Window | None:
        """The traced step that stands for all."""
        return typical(self.run.traced)

    @cached_property
    def step_seconds(self) -> float | None:
        """The median time of a step."""
        times = [step.seconds for step in self.run.steps if step.seconds is not None and step.seconds > 0]
        return median(times) if times else None

    @cached_property
    def tokens_a_second(self) -> float | None:
        """The median speed of all ranks together."""
        speeds = [speed for step in self.run.steps if (speed := speed_of(step)) is not None]
        return median(speeds) if speeds else None

    @property
    def losses(self) -> list[Step]:
        """The steps that have a loss, which may be NaN."""
        return [step for step in self.run.steps if step.loss is not None]

    @property
    def first_bad_loss(self) -> Step | None:
        """The first step whose loss is NaN or infinite."""
        return next((step for step in self.losses if not math.isfinite(step.loss or 0.0)), None)

    @property
    def bad_losses(self) -> int:
        """How many losses are NaN or infinite."""
        return sum(not math.isfinite(step.loss or 0.0) for step in self.losses)

    @property
    def memory(self) -> Memory | None:
        return self.run.memory

    @property
    def padded(self) -> float | None:
        """Ψ as it is communicated. None if it is no count."""
        number = self.run.number("padded") or self.run.number("parameters")
        return number if number is not None and number >= 1 else None

    @property
    def volume(self) -> float | None:
        """What a step communicated, in Ψ."""
        if self.run.volume is None or not self.padded:
            return None
        return sum(self.run.volume.elements.values()) / self.padded

    @property
    def planned(self) -> PlanRow | None:
        """What the plan said of this setting."""
        return None if self.run.plan is None else self.run.plan.own

    @property
    def stage(self) -> int | None:
        stage = self.run.number("stage")
        return int(stage) if stage is not None and stage in (0, 1, 2, 3) else None

    @property
    def ranks(self) -> int:
        """How many ranks divide the states."""
        number = self.run.number("shards") or self.run.number("ranks")
        return int(number) if number is not None and 1 <= number < 1e9 else 1

    @property
    def setting(self) -> str:
        """Stage, offload, ranks and dtype, as a title has them."""
        stage = [] if self.stage is None else [f"stage {self.stage}"]
        number = self.run.number("ranks")
        ranks = int(number) if number is not None and 1 <= number < 1e9 else 1
        words = [*stage, f"{ranks} rank{'s' if ranks > 1 else ''}", self.run.text("precision")]
        if isinstance(self.run.head.get("offload"), dict):
            words.append("offload cpu")
        return " · ".join(word for word in words if word)


def speed_of(step: Step) -> float | None:
    """Tokens a second in one step."""
    return step.tokens / step.seconds if step.tokens and step.seconds and step.seconds > 0 else None


def seconds_text(seconds: float) -> str:
    """A time as people read it.

    >>> seconds_text(1.234), seconds_text(0.0213), seconds_text(0.0000042)
    ('1.23 s', '21.3 ms', '4.2 µs')
    """
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    unit, name = next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms")) if seconds >= 0.9995 * u), (1e-6, "µs"))
    return f"{seconds / unit:.3g} {name}"


def size_text(size: float) -> str:
    """A number of bytes as people read it.

    >>> size_text(31.44e9), size_text(512)
    ('31.4 GB', '512 B')
    """
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"))
    unit, name = next(((u, n) for u, n in units if size >= 0.9995 * u), (1.0, "B"))
    return f"{size / unit:.3g} {name}"


def number_text(value: float) -> str:
    """A number with at most four digits, or without decimals.

    >>> number_text(12345.6), number_text(0.123456), number_text(float("nan"))
    ('12,346', '0.1235', 'nan')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 and math.isfinite(value) else f"{value:.4g}"


def count_text(count: float) -> str:
    """How many parameters, as people say it.

    >>> count_text(8.03e9), count_text(124e6), count_text(39_072)
    ('8.03B', '124M', '39,072')
    """
    unit, name = next(((u, n) for u, n in ((1e9, "B"), (1e6, "M")) if count >= u), (1.0, ""))
    return f"{count / unit:.4g}{name}" if name else f"{count:,.0f}"


def thinned(steps: Sequence[Entry], most: int) -> list[Sequence[Entry]]:
    """Groups of steps that follow each other, at most ``most`` of them, so that a long run is still a small page."""
    size = max(1, -(-len(steps) // most))
    return [steps[start : start + size] for start in range(0, len(steps), size)]
