"""All stages and offloads of a job on given hardware: which of them fit, and which one to take."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

import torch

from ..config.offload import Offload
from ..config.options import AUTO, Activations
from .machine.hardware import Hardware
from .memory.budget import WORKSPACE, Budget, budget
from .model.source import Subject
from .model.trace import Trace
from .setup import Setup
from .time.scale import tokens_a_step
from .time.step_time import StepTime, step_span, step_time
from .volume import Volume, volume

LARGEST_BATCH = 1 << 20
MOMENTS: tuple[torch.dtype | Literal["8bit"], ...] = (torch.float32, torch.bfloat16, "8bit")
"""How moments may be stored, from what changes results least."""
AS_FAST = 0.95
"""A row with at least this share of the best speed counts as equally fast, because predictions are not more exact. Of
equally fast rows the one that changes least is taken."""


@dataclass(frozen=True)
class Variant:
    """One way to offload."""

    name: str
    offload: Offload | None


def variants(stage: int, setup: Setup, hardware: Hardware) -> Iterator[Variant]:
    """The offloads that get a row: none, all states, all states in fewer bytes, and in stage 3 the parameters too."""
    yield Variant("none", None)
    if hardware.on_cpu:
        return
    bf16 = torch.bfloat16
    yield Variant("cpu", Offload())
    yield Variant("cpu, 16-bit states", Offload(moments=bf16))
    half = setup.precision == "bf16"  # the upper half of an fp32 number is a bf16 number, not an fp16 number
    early = setup.precision != "fp16" and setup.micro_batches == 1  # otherwise the update needs all gradients first
    yield Variant("cpu, small", Offload(moments="8bit", split_master=half, read_back=half, update_in_backward=early))
    if stage == 3:
        yield Variant("cpu, parameters too", Offload(parameters="cpu"))


class Traced(Protocol):
    """A model that has a trace for every setup."""

    @property
    def parameters(self) -> int: ...

    def trace(self, setup: Setup) -> Trace: ...


@dataclass(frozen=True)
class Row:
    """The plan of one stage and offload."""

    variant: Variant
    model: Traced | Trace
    setup: Setup
    hardware: Hardware

    @cached_property
    def traced(self) -> Trace:
        return self.model if isinstance(self.model, Trace) else self.model.trace(self.setup)

    @property
    def parameters(self) -> int:
        """Ψ of the whole model."""
        whole = self.setup.model_parallel == 1 or isinstance(self.model, Trace)
        return self.traced.parameters if whole else self.model.parameters

    @cached_property
    def budget(self) -> Budget:
        return budget(self.traced, self.setup, 0 if self.hardware.on_cpu else WORKSPACE)

    @cached_property
    def volume(self) -> Volume:
        return volume(self.traced, self.setup)

    @cached_property
    def time(self) -> StepTime | None:
        """None without a machine profile, and for a module whose FLOPs are not known."""
        work = self.traced.work
        if self.hardware.machine is None or work is None:
            return None
        return step_time(work, self.setup, self.hardware.machine)

    @cached_property
    def span(self) -> tuple[float, float] | None:
        """The least and the most seconds of a step to expect. They are equal where one number can be said."""
        work = self.traced.work
        if self.hardware.machine is None or self.time is None or work is None:
            return None
        return step_span(self.time, work, self.setup, self.hardware.machine)

    @property
    def room(self) -> float:
        """Bytes of the device that stay free; negative if the row does not fit."""
        on_host = self.budget.host.total if self.hardware.on_cpu else 0  # it is the same memory
        return self.hardware.usable_device_memory - self.budget.peak.total - on_host

    @property
    def host_room(self) -> float:
        """Bytes that stay free in this rank's part of host memory."""
        return self.hardware.host_memory_per_rank - self.budget.host.total

    @property
    def fits(self) -> bool:
        return self.room >= 0 and self.host_room >= 0  # without offload too: checkpoints may be on the host

    @property
    def recomputed(self) -> int:
        """The number of blocks that are recomputed."""
        return self.traced.blocks - len(self.traced.kept) if self.setup.checkpointing else 0

    @property
    def tokens_a_second(self) -> float | None:
        """The sum over all ranks."""
        return None if self.time is None else tokens_a_step(self.setup) / self.time.total


def plan(subject: Subject, setup: Setup, hardware: Hardware, batch: int | Literal["max"]) -> list[Row]:
    """A row for every stage and offload; everything else is as in ``setup``."""
    found = []
    for stage in range(4):
        for variant in variants(stage, setup, hardware):
            asked = replace(setup, stage=stage, offload=variant.offload, batch=1 if batch == "max" else batch)
            if batch == "max":
                asked = replace(asked, batch=largest_batch(subject, asked, hardware))
            found.append(with_fewest_recomputed(_row(variant, subject, asked, hardware)))
    return found


def with_fewest_recomputed(row: Row, fits: Callable[[Row], bool] = lambda row: row.fits) -> Row:
    """With ``recompute="auto"``: the row that recomputes as few blocks as fit, all if that does not fit either."""
    options = row.setup.activations
    if options is None or options.recompute != AUTO:
        return row

    def recomputing(first: int) -> Row:
        chosen = replace(options, recompute=Activations.share(first, row.traced.blocks)) if first else None
        return replace(row, setup=replace(row.setup, checkpointing=first > 0, activations=chosen))

    # One more block that is recomputed never raises the peak, so the answer is found by halving.
    first = bisect_left(range(row.traced.blocks), True, key=lambda first: fits(recomputing(first)))
    return recomputing(first)


def _row(variant: Variant, subject: Subject, setup: Setup, hardware: Hardware) -> Row:
    recomputes = subject.model.trace(setup).recomputes  # a trace shows whether blocks are recomputed
    return Row(variant, subject.model, replace(setup, checkpointing=recomputes), hardware)


def largest_batch(subject: Subject, setup: Setup, hardware: Hardware) -> int:
    """The largest number of sequences that fits, for a rank and micro-batch; 1 if not even one fits."""

    def room(batch: int) -> float:
        row = _row(Variant("", setup.offload), subject, replace(setup, batch=batch), hardware)
        return min(row.room, row.host_room)

    return max(1, largest_with_room(room, LARGEST_BATCH))


def recommend(rows: Sequence[Row]) -> Row | None:
    """The fastest row that fits. Without times: the row that changes least. None if nothing fits."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return None
    speeds = [row.tokens_a_second or 0.0 for row in fitting]
    as_fast = [row for row, speed in zip(fitting, speeds, strict=True) if speed >= AS_FAST * max(speeds)]
    return min(as_fast, key=change)


def change(row: Row) -> tuple[float, ...]:
    """How much a setting changes for the user, as a key to sort by: results, then the loop, then where things are."""
    offload = row.setup.offload
    if offload is None:
        return (False, row.setup.stage)
    changed = (offload.delayed_update_after is not None, offload.update_in_backward, MOMENTS.index(offload.moments))
    fraction = 0.0 if offload.host_fraction == "auto" else offload.host_fraction
    places = (offload.parameters == "cpu", offload.read_back, offload.split_master, fraction)
    return (True, *changed, row.setup.stage, *places)


def largest_with_room(
    room: Callable[[int], float], most: int, size: Callable[[int], float] = float, *, near: int = 2
) -> int:
    """The largest number up to ``most`` with room, if all smaller numbers have room too; 0 if none has.

    Room is nearly a straight line over ``size``. So the next number to try is where the line through the last two that
    were tried is at 0. The first after 1 is ``near``, which may be far from the answer.

    >>> tried = []
    >>> largest_with_room(lambda number: tried.append(number) or 77.5**2 - number**2, 1000, lambda number: number**2)
    77
    >>> tried
    [1, 2, 77, 78]
    """
    low, at_low = 1, room(1)
    if at_low < 0:
        return 0
    high, other, tries = most + 1, (0, math.inf), 0  # ``other``: one more number that was tried, and its room
    while high - low > 1:
        tries += 1
        number, at_number = other
        if math.isinf(at_number) or at_number == at_low:
            guess = near if tries == 1 else 2 * low
        elif tries % 4 == 0 and high <= most:
            guess = (low + high) // 2  # where the line is far from straight
        else:
            slope = (size(number) - size(low)) / (at_number - at_low)
            target = size(low) - at_low * slope
            guess = bisect_right(range(low, high), target, key=size) + low - 1
        guess = min(max(guess, low + 1), high - 1)
        found = room(guess)
        if found < 0:
            high, other = guess, (guess, found)
        else:
            other, low, at_low = (low, at_low), guess, found
    return low
