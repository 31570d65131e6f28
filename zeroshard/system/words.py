"""Writes words of a file or of a user into messages, so that a message stays short and does nothing to a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

LARGEST_INT_BITS = 1024
"""Larger integers are not written with all their digits: the time for that grows with the square of the digits."""
DEEPEST = 8
"""Levels of nesting that are written."""
BRACKETS = {list: ("[", "]"), tuple: ("(", ")"), set: ("{", "}"), frozenset: ("frozenset({", "})"), dict: ("{", "}")}


def quoted(value: object, most: int = 120) -> str:
    r"""The value as Python writes it, on one line, without control characters, cut in the middle if it is longer.

    The time does not grow with the size of strings, numbers, lists and tables.

    >>> quoted("a\x1b[31m"), quoted({"r": [1, 2]})
    ("'a\\x1b[31m'", "{'r': [1, 2]}")
    >>> quoted("abc" * 1000, most=20)
    "'abcabcab…bcabcabc'"
    """
    text = ""
    for part in _parts(value, most, 0):
        text += part
        if len(text) > 4 * most:  # the rest of a list or a table, whose end is not shown
            return _printable(text)[: most - 1] + "…"
    return _cut(_printable(text), most)


def word(text: str, most: int = 120) -> str:
    r"""A name as it is; quoted if it is long, empty, or has characters that cannot be printed.

    >>> print(word("layer.0"), word("two\nlines"))
    layer.0 'two\nlines'
    """
    return text if 0 < len(text) <= most and text.isprintable() else quoted(text, most)


def line(text: str, most: int = 400) -> str:
    """A text on one line, without control characters, cut in the middle if it is longer than ``most`` characters."""
    return _cut(_printable(_cut(text, 4 * most)), most)  # cut first, so that a long text costs nothing


def told(error: BaseException) -> str:
    """An error's class and words, on one short line."""
    return f"{type(error).__name__}: {line(str(error), 200)}"


def printable(text: str) -> str:
    r"""A text for a terminal: control characters are written as escapes, except the ends of lines.

    >>> print(printable("two\nlines, \x1b[31mred"))
    two
    lines, \x1b[31mred
    """
    return "\n".join(map(_printable, text.split("\n")))


def _parts(value: object, most: int, depth: int) -> Iterator[str]:
    """The text of a value in parts, of which a caller may leave the last ones out."""
    kind = type(value)
    if isinstance(value, str) and kind is str:
        yield repr(value if len(value) <= 2 * most else value[:most] + value[-most:])
    elif isinstance(value, bytes) and kind is bytes:
        yield repr(value[:most] + value[-most:] if len(value) > 2 * most else value)
    elif isinstance(value, int) and value.bit_length() > LARGEST_INT_BITS:
        yield f"{'-' if value < 0 else ''}(an integer of {value.bit_length()} bits)"
    elif kind not in BRACKETS or not value:
        yield _representation(value, most)
    elif depth > DEEPEST:
        yield "…"
    else:
        opening, closing = BRACKETS[kind]  # type: ignore[index]
        yield opening
        entries = islice(value, 4 * most)  # type: ignore[call-overload]
        for number, entry in enumerate(entries):
            yield ", " if number else ""
            yield from _parts(entry, most, depth + 1)
            if isinstance(value, dict):
                yield ": "
                yield from _parts(value[entry], most, depth + 1)
        yield ("," if isinstance(value, tuple) and len(value) == 1 else "") + closing


def _representation(value: object, most: int) -> str:
    try:
        text = repr(value)
    except Exception:  # a class of a user may do anything
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 4 * most else text[: 2 * most] + text[-2 * most :]


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[:half]}…{text[-half:]}"
