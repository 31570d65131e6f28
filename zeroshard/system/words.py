"""Words of files that others wrote, as messages may show them: on one line, and short."""

from __future__ import annotations

import reprlib
from typing import Any

ELLIPSIS = "..."


def quoted(value: object, most: int = 120) -> str:
    """The value as Python writes it, on one line, without control characters, cut in the middle if it is longer.

    >>> quoted("layer.0.weight")
    "'layer.0.weight'"
    >>> quoted("x" * 1000, most=20)
    "'xxxxxxx...xxxxxxxx'"
    """
    return line(_Short(most).repr(value), most)


def line(text: str, most: int = 400) -> str:
    """A text on one line, without control characters, cut in the middle if it is longer than ``most`` characters."""
    text = _cut(text, 4 * most)  # first, so that a long text costs nothing
    shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
    return _cut(shown, most)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    room = max(0, most - len(ELLIPSIS))
    before = room // 2
    return text[:before] + ELLIPSIS + text[len(text) - (room - before) :]


class _Short(reprlib.Repr):
    """Writes a value without ever writing all of a large value."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxtuple = self.maxlist = self.maxdict = self.maxset = self.maxfrozenset = 30
        self.maxstring = self.maxlong = self.maxother = most

    def repr_int(self, value: int, level: int) -> str:
        """A whole number. Python refuses to write one of many thousand digits, and takes long for fewer."""
        if value.bit_length() > 4 * self.maxlong:
            return f"{'-' * (value < 0)}<a whole number of {value.bit_length()} bits>"
        return repr(value)

    def repr_instance(self, value: Any, level: int) -> str:
        """Any other object: by its class alone if its own text cannot be made."""
        try:
            return _cut(repr(value), self.maxother)
        except Exception:  # the text of a class of anybody
            return f"<a {type(value).__name__}>"
