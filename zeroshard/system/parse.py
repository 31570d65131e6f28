"""Reads JSON and TOML that somebody else wrote. Whatever is wrong with a text is a ``ValueError`` of one line."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .words import printable, quoted

LARGEST_JSON = 100_000_000
"""Bytes of a JSON file or header. safetensors has the same limit."""
LARGEST_TOML = 100_000
LONGEST_LINE = 4_000
"""Bytes of a line of TOML. Python's time for a key grows with the square of the dots in the key."""
LONGEST_REASON = 300


def read_start(file: Path, most: int) -> bytes:
    """The content of a file. Raises ValueError if the file has more than ``most`` bytes."""
    with open(file, "rb") as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content


def parse_json(content: bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also where a table has a key twice: which one is meant is not known.

    >>> parse_json(b'{"r": 1, "r": 2}')
    Traceback (most recent call last):
    ...
    ValueError: not JSON: a table has the key 'r' twice
    """
    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=_table)
    except RecursionError:
        raise ValueError("not JSON: it is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {_reason(error)}") from error


def parse_toml(content: bytes) -> dict[str, Any]:
    """The tables of a TOML text. Raises ValueError.

    >>> parse_toml(b"a = " + b"[" * 3_000)
    Traceback (most recent call last):
    ...
    ValueError: not TOML: it is nested too deep
    """
    for number, line in enumerate(content.split(b"\n"), start=1):
        if len(line) > LONGEST_LINE:
            raise ValueError(f"line {number} has more than {LONGEST_LINE:,} bytes")
    try:
        return tomllib.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("not TOML: it is nested too deep") from None
    except ValueError as error:  # also an integer with more digits than Python reads
        raise ValueError(f"not TOML: {_reason(error)}") from error


def _table(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"a table has the key {quoted(twice)} twice")
    return table


def _reason(error: ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    text = " ".join(printable(str(error)[:LONGEST_REASON]).split())
    return text.partition("; use sys.")[0]  # Python's advice about its limit on digits
