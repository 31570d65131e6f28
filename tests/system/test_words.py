"""Words of a file in a message: one line, short, and never a character that a terminal obeys."""

from __future__ import annotations

import time

import pytest

from zeroshard.system.words import line, quoted


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


VALUES: dict[str, object] = {
    "a long name": "layer." * 1_000_000,
    "lines and colours": "\x1b[31mred\r\n\u2028\u202e\x00",
    "a long list": list(range(1_000_000)),
    "lists in lists": [[["x" * 1000] * 1000] * 1000] * 1000,
    "a table": {letter * 1000: "v\n" * 1000 for letter in "abc"},
    "a number of many digits": 10**100_000,
    "a negative one": -(10**5000),
    "an object without a text": Rude(),
}


@pytest.mark.parametrize("what", VALUES)
def test_any_value_is_shown_on_one_short_line(what: str) -> None:
    begin = time.monotonic()
    shown = quoted(VALUES[what])
    assert time.monotonic() - begin < 1
    assert 0 < len(shown) <= 120
    assert shown.isprintable()


def test_a_short_value_is_shown_as_python_writes_it() -> None:
    for value in ("first.weight", 5, -1, 0.9, (0.9,), [1], {"a": 1}, None, True, float("nan")):
        assert quoted(value) == repr(value)


def test_a_long_value_keeps_its_begin_and_its_end() -> None:
    shown = quoted("begin" + "x" * 1000 + "end")
    assert shown.startswith("'begin")
    assert shown.endswith("end'")
    assert line("begin\n" + "x" * 1000 + "end", most=50).startswith("begin\\n")
