"""Events as JSON lines, for other programs: one object a line, with the keys of `events.py`."""

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TextIO

from .events import NAMES, Event


class JsonLines:
    """Writes events to a stream.

    >>> from .events import Evaluation
    >>> JsonLines(sys.stdout).receive(Evaluation(step=4, held_out_loss=float("nan")))
    {"event": "evaluation", "step": 4, "held_out_loss": null}
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def receive(self, event: Event) -> None:
        """Write one line, at once."""
        line = {"event": NAMES[type(event)], **_finite(asdict(event))}
        self._stream.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the stream open: whoever opened it closes it."""


def take_stdout() -> TextIO:
    """Return standard output as a stream, and send to standard error whatever else this process prints.

    That includes what other libraries print, in Python or not.
    """
    sys.stdout.flush()
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return lines


def _finite(value: Any) -> Any:
    """Return a value without infinities and NaN, which JSON does not have: they become None."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
