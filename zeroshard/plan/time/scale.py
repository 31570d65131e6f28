"""How a job scales to more devices, and the cost of a whole training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..machine.profile import Machine
from ..setup import Setup
from .step_time import StepTime, step_time
from .work import Work

DAY = 24 * 3600


@dataclass(frozen=True)
class ScalePoint:
    """A job on some number of devices. The batch of a device is always the same."""

    devices: int
    time: StepTime
    tokens_a_second: float
    """The sum over all devices."""
    efficiency: float
    """Tokens a second and device, relative to one replica that communicates with no other."""

    @property
    def exposed(self) -> float:
        """The share of a step in which only communication happens."""
        return self.time.exposed / self.time.total


@dataclass(frozen=True)
class Cost:
    """The cost of a whole training."""

    steps: float
    seconds: float
    devices: int

    @property
    def days(self) -> float:
        return self.seconds / DAY

    @property
    def device_hours(self) -> float:
        return self.devices * self.seconds / 3600


def tokens_a_step(setup: Setup) -> int:
    """Tokens of all ranks in a step. The ranks of a model-parallel group see the same tokens.

    >>> tokens_a_step(Setup(stage=2, world=8, model_parallel=4, batch=4, sequence=1024, micro_batches=2))
    65536
    """
    return setup.world * setup.batch * setup.sequence * setup.micro_batches


def doubling(first: int, last: int) -> list[int]:
    """The first number, its doubles, and the last number.

    >>> doubling(8, 100)
    [8, 16, 32, 64, 100]
    """
    if not 1 <= first <= last:
        raise ValueError(f"scale={first}..{last} must be two numbers of devices, the smaller first")
    counts = [first]
    while 2 * counts[-1] < last:
        counts.append(2 * counts[-1])
    return counts if counts[-1] == last else [*counts, last]


def scale(work: Work, setup: Setup, machine: Machine, devices: Iterable[int]) -> list[ScalePoint]:
    """Efficiency and exposed communication for each number of devices. The batch of a rank stays the same."""
    alone = replace(setup, stage=min(setup.stage, 2), world=1)
    computing = step_time(work, alone, machine)
    best = tokens_a_step(alone) / (computing.compute + computing.launching) / alone.devices
    points = []
    for count in devices:
        world, rest = divmod(count, setup.model_parallel)
        if rest or not world:
            raise ValueError(f"{count} devices cannot be divided into groups of model_parallel={setup.model_parallel}")
        here = replace(setup, world=world)
        time = step_time(work, here, machine)
        rate = tokens_a_step(here) / time.total
        points.append(ScalePoint(count, time, rate, rate / count / best))
    return points


def cost(work: Work, setup: Setup, machine: Machine, tokens: float) -> Cost:
    """The cost of training on ``tokens`` tokens.

    >>> from ..machine.profile import load
    >>> from ..papers.shape import Transformer
    >>> setup = Setup(stage=2, world=8, batch=8)
    >>> gpt = Transformer(layers=48, hidden=1600, heads=25, vocabulary=50304, positions=1024)
    >>> round(cost(gpt.work(setup), setup, load("h200"), tokens=30e9).days, 1)
    1.2
    """
    if tokens <= 0:
        raise ValueError(f"tokens={tokens!r} must be a positive number")
    steps = tokens / tokens_a_step(setup)
    return Cost(steps, steps * step_time(work, setup, machine).total, setup.devices)
