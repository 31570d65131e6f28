"""What a person sees while a run goes on: a bar with numbers below it on a terminal, plain lines elsewhere."""

import math
import os
import sys
from collections.abc import Iterable, Mapping

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from .events import Bytes, Evaluation, Event, RunStart, StepEvent

SHOWN = ("parameters", "gradients", "optimizer_states")


def rank_zero_console(rank: int, *, errors: bool = False) -> Console:
    """Return a console that prints on rank 0 and is silent on every other rank. `errors`: on standard error."""
    return Console(file=sys.stderr if errors else sys.stdout, quiet=rank != 0)


def say(console: Console, text: str) -> None:
    """Print text as it is: no wrapping, no colours, no markup."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def draws(console: Console, environment: Mapping[str, str]) -> bool:
    """Return whether a bar can be drawn: on a terminal, unless TERM=dumb or NO_COLOR ask for plain text."""
    plain = environment.get("TERM", "") in ("dumb", "unknown") or environment.get("NO_COLOR", "")
    return not console.quiet and console.is_terminal and console.file.isatty() and not plain


class Bar(Progress):
    """The steps as a bar, with the numbers of the last measured step below it. Where no bar is drawn: lines.

    Use as a context manager: inside, the bar is there.
    """

    def __init__(self, steps: int, console: Console, environment: Mapping[str, str] = os.environ) -> None:
        self._lines: list[str] = []  # set first, because the constructor below draws
        self._draws = draws(console, environment)
        left = TextColumn("{task.fields[left]}")
        columns = (TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left)
        super().__init__(*columns, console=console, transient=True, disable=not self._draws)
        self._task = self.add_task("step", total=steps, left="")

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return what is drawn: the bar, and the numbers below it."""
        yield from super().get_renderables()
        for line in self._lines:
            yield Text(line)

    def expect(self, steps: int) -> None:
        """Set how many steps there are."""
        self.update(self._task, total=steps)

    def reach(self, step: int) -> None:
        """Move the bar to a step."""
        self.update(self._task, completed=step)

    def receive(self, event: Event) -> None:
        """Show the numbers of a measured step: below the bar, or as a line. Show evaluations as lines."""
        match event:
            case RunStart():
                self.reach(event.step)
            case StepEvent():
                self.reach(event.step)
                self._lines = panel(event)
                if event.seconds_left is not None:
                    self.update(self._task, left=f"{duration(event.seconds_left)} left")
                if not self._draws:
                    say(self.console, step_line(event))
            case Evaluation():
                when = f"after {event.step} steps" if event.step else "before training"
                say(self.console, f"held-out loss {event.held_out_loss:.3f} {when}")

    def close(self) -> None:
        """Do nothing: the bar goes when its block ends."""


def step_line(event: StepEvent) -> str:
    """Return the numbers of a step in one line."""
    parts = [f"step {event.step}/{event.of}", f"loss {event.loss:.3f}"]
    if event.tokens_per_second is not None:
        parts.append(f"{event.tokens_per_second:,.0f} tokens/s")
    parts += [*_memory(event), *_moved(event)]
    if event.seconds_left is not None and event.step < event.of:
        parts.append(f"{duration(event.seconds_left)} left")
    return " · ".join(parts)


def panel(event: StepEvent) -> list[str]:
    """Return the lines below the bar: what is learned, where the memory is, and what the step cost."""
    learned = [f"loss {event.loss:.3f}"]
    if event.held_out_loss is not None:
        learned.append(f"held-out {event.held_out_loss:.3f}")
    learned.append(f"lr {event.lr:.3g}")
    if event.gradient_norm is not None:
        learned.append(f"gradient norm {event.gradient_norm:.3g}")
    if event.tokens_per_second is not None:
        learned.append(f"{event.tokens_per_second:,.0f} tokens/s")
    lines = [" · ".join(learned), *_memory(event), " · ".join(_moved(event))]
    return [line for line in lines if line]


def duration(seconds: float) -> str:
    """Return a time as a clock shows it.

    >>> duration(59.6), duration(3725), duration(200_000)
    ('1:00', '1:02:05', '2 d 7:33:20')
    """
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{rest:02}" if hours or days else f"{minutes}:{rest:02}"
    return f"{days} d {clock}" if days else clock


def _memory(event: StepEvent) -> list[str]:
    host = event.host_memory
    if host is None or not any(host[kind] for kind in SHOWN):
        return [_by_kind(event.device_memory)]
    return [f"device: {_by_kind(event.device_memory)}", f"host: {_by_kind(host)}"]


def _by_kind(memory: Bytes) -> str:
    return ", ".join(f"{kind.replace('_', ' ')} {memory[kind] / 1e6:.1f}" for kind in SHOWN) + " MB"


def _moved(event: StepEvent) -> list[str]:
    parts = [] if event.volume is None else [f"volume {event.volume:.2f} Ψ"]
    if event.exposed_waits is not None:
        parts.append(waits_text(event.exposed_waits))
    return parts


def waits_text(waits: Mapping[str, float]) -> str:
    """Return the exposed waits of a step, and what most of them were for.

    >>> waits_text({"host_update": 0.0112, "gradient_copies": 0.0008, "agreement": 0.0})
    'waits 0.012 s a step, most for host update'
    """
    whole = sum(waits.values())
    if whole < 0.0005:
        return "no waits"
    largest = max(waits, key=lambda cause: waits[cause])
    return f"waits {whole:.3f} s a step, most for {largest.replace('_', ' ')}"
