"""Where a warning is shown: at the user's own line, however deep in torch or zeroshard the warning is given."""

from __future__ import annotations

import inspect

_LIBRARIES = ("zeroshard", "torch", "contextlib")


def user_level() -> int:
    """The ``stacklevel`` for ``warnings.warn`` in the calling function: the innermost line outside the libraries."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level
