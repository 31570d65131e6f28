"""Everybody who is told the events of a run. Whoever fails is dropped with one warning, and training goes on."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

from .events import Event, Sink


class Audience:
    """The sinks of a run. Use as a context manager: it closes them.

    >>> class Broken:
    ...     def receive(self, event): raise OSError("no space left on device")
    ...     def close(self): pass
    >>> from .events import Evaluation
    >>> with Audience(print) as audience:
    ...     audience.add("the broken logger", Broken())
    ...     audience.tell(Evaluation(step=1, held_out_loss=2.0))
    ...     audience.tell(Evaluation(step=2, held_out_loss=1.0))
    warning: the broken logger is off from now on: OSError: no space left on device
    """

    def __init__(self, warn: Callable[[str], object], sinks: Sequence[Sink] = ()) -> None:
        """`warn` prints a line. The `sinks` are trusted: an error of theirs is an error of the run."""
        self._warn, self._trusted = warn, tuple(sinks)
        self._others: dict[str, Sink] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for sink in self._trusted:
            sink.close()
        for name, sink in list(self._others.items()):
            self._try(name, sink.close)
        self._others.clear()

    def add(self, name: str, sink: Sink) -> None:
        """Add a sink that may fail."""
        self._others[name] = sink

    def drop(self, name: str, error: Exception) -> None:
        """Warn that a sink failed. It is told nothing more."""
        self._warn(f"warning: {name} is off from now on: {type(error).__name__}: {error}")

    def tell(self, event: Event) -> None:
        """Give an event to every sink."""
        for sink in self._trusted:
            sink.receive(event)
        for name, sink in list(self._others.items()):
            self._try(name, partial(sink.receive, event))

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            del self._others[name]
            self.drop(name, error)
