"""What rank 0 shows while it trains: a live bar on a terminal, plain lines everywhere else."""

import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from .summary import StateBytes


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The numbers of one report; memory is this rank's model states, between backward and step."""

    step: int
    loss: float
    tokens_per_second: float | None
    """None until a step was timed."""
    memory: StateBytes
    host_memory: StateBytes | None = None
    """With offload, what of them is on the host; `memory` is then what is on the device."""
    volume: float | None
    """Elements communicated in a step, in Ψ; None until a step was measured."""

    def __str__(self) -> str:
        parts = [f"loss {self.loss:.3f}"]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.host_memory is None:
            parts.append(_by_kind(self.memory))
        else:
            parts += [f"device: {_by_kind(self.memory)}", f"host: {_by_kind(self.host_memory)}"]
        if self.volume is not None:
            parts.append(f"volume {self.volume:.2f} Ψ")
        return " · ".join(parts)


def _by_kind(memory: StateBytes) -> str:
    parameters, gradients, states = (f"{number / 1e6:.1f}" for number in memory)
    return f"parameters {parameters}, gradients {gradients}, optimizer states {states} MB"


class TrainingProgress:
    """Use as a context manager; `advance` after every step, `report` now and then, `say` whenever."""

    def __init__(self, steps: int, console: Console) -> None:
        self.steps = steps
        self.console = console
        self._bar = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("step", total=steps)
        self._numbers = Text("")
        self._live = Live(get_renderable=lambda: Group(self._bar, self._numbers), console=console, transient=True)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def resume(self, step: int) -> None:
        """Begin after a step."""
        self._bar.update(self._task, completed=step)
        self.say(f"resumed after step {step}/{self.steps}")

    def advance(self) -> None:
        """Move the bar on by one step."""
        self._bar.advance(self._task)

    def report(self, report: StepReport) -> None:
        """Show a step's numbers."""
        if self.console.is_terminal:
            self._numbers = Text(str(report))
        else:
            self.say(f"step {report.step}/{self.steps} · {report}")

    def say(self, text: str) -> None:
        """Show a line that stays."""
        say(self.console, text)


def say(console: Console, text: str) -> None:
    """Print text as it is: no wrapping, no colours, no markup."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def rank_zero_console(rank: int) -> Console:
    """Return a console that prints on rank 0 and is silent on every other."""
    return Console(file=sys.stdout, quiet=rank != 0)
