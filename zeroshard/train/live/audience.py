"""Everybody who is told the events of a run. Whoever fails is dropped with one warning, and training goes on."""

from collections.abc import Callable
from functools import partial
from typing import Self

from rich.console import Console, RenderableType

from .events import Event, Sink
from .terminal import Bar, say


class Audience:
    """The console with its bar, and the sinks of a run. Use as a context manager: it closes the sinks.

    >>> class Broken:
    ...     def receive(self, event): raise OSError("no space left on device")
    ...     def close(self): pass
    >>> from .events import Evaluation
    >>> with Audience(Console(), steps=2) as audience:
    ...     audience.add("the broken logger", Broken())
    ...     audience.tell(Evaluation(step=1, held_out_loss=2.0))
    ...     audience.tell(Evaluation(step=2, held_out_loss=1.0))
    held-out loss 2.000 after 1 steps
    warning: the broken logger is off from now on: OSError: no space left on device
    held-out loss 1.000 after 2 steps
    """

    def __init__(self, console: Console, steps: int) -> None:
        """On a rank whose `console` is quiet nobody is told anything."""
        self._console = console
        self.bar = Bar(steps, console)
        """Use as a context manager while steps are made."""
        self._sinks: dict[str, Sink] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for name, sink in list(self._sinks.items()):
            self._try(name, sink.close)
        self._sinks.clear()

    @property
    def listens(self) -> bool:
        """Whether this rank tells anybody anything."""
        return not self._console.quiet

    def add(self, name: str, sink: Sink) -> None:
        """Add a sink. If it fails, it is dropped."""
        if self.listens:
            self._sinks[name] = sink

    def drop(self, name: str, error: Exception) -> None:
        """Warn that a sink failed. It is told nothing more."""
        self._sinks.pop(name, None)
        self.say(f"warning: {name} is off from now on: {type(error).__name__}: {error}")

    def tell(self, event: Event) -> None:
        """Give an event to the bar and to every sink. An error of the console is an error of the run."""
        self.bar.receive(event)
        for name, sink in list(self._sinks.items()):
            self._try(name, partial(sink.receive, event))

    def say(self, text: str) -> None:
        """Print lines that are no event, for a person alone."""
        say(self._console, text)

    def show(self, part: RenderableType) -> None:
        """Print a table, or a line as it is."""
        if isinstance(part, str):
            self.say(part)
        else:
            self._console.print(part, highlight=False)

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self.drop(name, error)
