"""What a run measured: losses, speed, memory, volume and traffic. `probe.py` adds to it, `views.py` shows it."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..observe.ledger import Memory, Stats
from ..plan.papers.formulas import HostPart


@dataclass
class Stopwatch:
    """Seconds since `start`, without the time inside `paused` blocks."""

    _began: float = math.nan

    def start(self) -> None:
        """Begin to count."""
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time of the block."""
        paused = time.perf_counter()
        yield
        self._began += time.perf_counter() - paused

    @property
    def seconds(self) -> float:
        """Return the time counted so far; not a number before `start`."""
        return time.perf_counter() - self._began


class OffloadStep(NamedTuple):
    """One step with offload, measured when the host was done with it."""

    part: HostPart
    device: Memory
    """Between backward and step, when all gradients have landed."""
    host: Memory
    traffic: int | None
    """Bytes that crossed between host and device; None if the count includes an evaluation."""


class StepTrace(NamedTuple):
    """Some steps that were traced."""

    steps: range
    file: Path
    exposed_copies: float | None
    """The share of the time in which only copies ran; None if nothing was copied."""


@dataclass(kw_only=True)
class Record:
    """One run, as one rank measures it. It has no reference to the model, so it can outlive the model."""

    world: int
    """Data-parallel ranks."""
    tensor_parallel: int = 1
    precision: str
    tokens_a_step: int
    """Tokens of all ranks in one step."""
    micro_batches: int = 1
    """Micro-batches of a rank in one step."""
    losses: list[float] = field(default_factory=list)
    """Training losses, one for each measured step."""
    held_out: list[float] = field(default_factory=list)
    """Losses on held-out files, one for each evaluation."""
    stats: Stats | None = None
    """Statistics of the last measured step; None before the first one."""
    volume: float | None = None
    """Elements communicated in a step, in Ψ; None if every measured step came right after an evaluation."""
    tokens_a_second: float | None = None
    """Speed of all ranks together; None until a second step is measured."""
    seconds_a_step: float | None = None
    """None until a second step is measured."""
    waits: dict[str, float] | None = None
    """Exposed waits by cause, in seconds a step, between the last two measured steps. None before there are two."""
    offload: OffloadStep | None = None
    """None without offload, or before the step that is measured with it."""
    trace: StepTrace | None = None
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    _evaluated_after: int = -1
    _timed_from: int | None = None
    _last: tuple[int, dict[str, float]] | None = None
    """The last measured step, and this rank's exposed waits until then."""

    @property
    def memory(self) -> Memory:
        """Model states on the device, between backward and step of the last measured step."""
        assert self.stats is not None, "a step was measured"
        assert self.stats.memory_at_step is not None, "a step was made"
        return self.stats.memory_at_step

    def state_dict(self) -> dict[str, list[float]]:
        """Return the part of the record that a checkpoint stores."""
        return {"losses": list(self.losses), "held_out": list(self.held_out)}

    def resume(self, step: int, state: Mapping[str, list[float]]) -> None:
        """Continue after a step, with the result of `state_dict` at that step."""
        self.losses, self.held_out = list(state["losses"]), list(state["held_out"])
        self.disturbed(step)  # loading communicates too

    def evaluated(self, step: int, loss: float) -> None:
        """Note the held-out loss after a step; step 0 is before the first one."""
        self.held_out.append(loss)
        self.disturbed(step)

    def disturbed(self, step: int) -> None:
        """Note that something after a step communicated, which counts for the step after it."""
        self._evaluated_after = step

    def waited_elsewhere(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Leave out the exposed waits between two readings, because they belong to an evaluation."""
        if self._last is not None:
            step, waits = self._last
            self._last = step, {cause: waits[cause] + after[cause] - before[cause] for cause in after}

    def measured(self, step: int, loss: float, stats: Stats) -> None:
        """Note a step's numbers. The first measured step starts the clock: its own time includes the set-up."""
        if self._timed_from is None:
            self._timed_from = step
            self.stopwatch.start()
        else:
            self.seconds_a_step = self.stopwatch.seconds / (step - self._timed_from)
            self.tokens_a_second = self.tokens_a_step / self.seconds_a_step
        waits = dict(stats.exposed_waits)
        if self._last is not None:
            last, before = self._last
            self.waits = {cause: max(0.0, waits[cause] - before[cause]) / (step - last) for cause in waits}
        self._last = step, waits
        self.losses.append(loss)
        self.stats = stats
        if self._evaluated_after != step - 1:  # the gathers of an evaluation count for the step after it
            self.volume = stats.volume_elements / stats.padded_parameters
