"""What a run measured, kept and shown: losses, tokens per second, memory and volume. It never touches the training."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console

from ..observe.ledger import Stats
from .progress import StepReport, TrainingProgress
from .summary import Offloaded, Outcome, StateBytes


class Stopwatch:
    """Seconds since `start`, without those spent `paused`."""

    def __init__(self) -> None:
        self._began = math.nan

    def start(self) -> None:
        """Begin to count."""
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what runs inside."""
        paused = time.perf_counter()
        yield
        self._began += time.perf_counter() - paused

    @property
    def seconds(self) -> float:
        """Return the time counted so far; not a number before `start`."""
        return time.perf_counter() - self._began


class Journal:
    """A run as rank 0 sees it. Use as a context manager: inside it, progress is shown."""

    def __init__(self, steps: int, tokens_per_step: int, console: Console) -> None:
        self.tokens_per_step = tokens_per_step
        self.losses: list[float] = []
        self.held_out: list[float] = []
        self.tokens_per_second: float | None = None
        self.volume: float | None = None
        self.stats: Stats | None = None
        self.stopwatch = Stopwatch()
        self._progress = TrainingProgress(steps, console)
        self._evaluated_after = -1
        self._timed_from: int | None = None

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def state_dict(self) -> dict[str, list[float]]:
        """What a checkpoint keeps of it."""
        return {"losses": list(self.losses), "held_out": list(self.held_out)}

    def resume(self, step: int, state: Mapping[str, list[float]]) -> None:
        """Go on from what `state_dict` gave after a step."""
        self.losses, self.held_out = list(state["losses"]), list(state["held_out"])
        self._evaluated_after = step  # loading communicates too, which counts to the next step
        self._progress.resume(step)

    def evaluated(self, step: int, loss: float) -> None:
        """Note the held-out loss after a step, 0 for before the first."""
        self.held_out.append(loss)
        self._evaluated_after = step
        self._progress.say(f"held-out loss {loss:.3f} " + (f"after {step} steps" if step else "before training"))

    def say(self, text: str) -> None:
        """Show a line that stays."""
        self._progress.say(text)

    def stepped(self) -> None:
        """Note that a step is done."""
        self._progress.advance()

    def report(self, step: int, loss: float, stats: Stats) -> None:
        """Note a step's numbers and show them. The first step has a report, and is not timed: it pays for set-up."""
        if self._timed_from is None:
            self._timed_from = step
            self.stopwatch.start()
        else:
            self.tokens_per_second = self.tokens_per_step * (step - self._timed_from) / self.stopwatch.seconds
        self.losses.append(loss)
        self.stats = stats
        if self._evaluated_after != step - 1:  # what an evaluation gathers counts to the volume of the step after it
            self.volume = stats.volume_elements / stats.padded_parameters
        host = stats.host_memory
        self._progress.report(
            StepReport(
                step=step,
                loss=loss,
                tokens_per_second=self.tokens_per_second,
                memory=_at_step(stats),
                host_memory=None if host is None or not host.model_states else StateBytes.of(host),
                volume=self.volume,
            )
        )

    def outcome(
        self, *, stage: int, world: int, precision: str, offloaded: Offloaded | None, tensor_parallel: int = 1
    ) -> Outcome:
        """Return what the closing table shows."""
        assert self.stats is not None, "the first step has a report"
        return Outcome(
            parameters=self.stats.parameters,
            stage=stage,
            world=world,
            tensor_parallel=tensor_parallel,
            precision=precision,
            measured=_at_step(self.stats),
            offloaded=offloaded,
            volume=self.volume,
            kept=self.stats.kept_parameters / self.stats.padded_parameters,
            first_loss=self.losses[0],
            last_loss=self.losses[-1],
            held_out_before=self.held_out[0],
            held_out_after=self.held_out[-1],
            tokens_per_second=self.tokens_per_second,
        )


def _at_step(stats: Stats) -> StateBytes:
    assert stats.memory_at_step is not None, "a step has been made"
    return StateBytes.of(stats.memory_at_step)
