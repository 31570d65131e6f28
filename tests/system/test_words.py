"""Words of others in messages: short, on one line, and without effect on a terminal."""

from __future__ import annotations

import time

import pytest

from zeroshard.system.words import line, printable, quoted


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -2.5, "layer.0", "it's", b"\x00", [], [1, "a"], (1,), (), {"r": {"s": [None]}}, set(), {3}],
)
def test_a_short_value_is_written_as_python_writes_it(value: object) -> None:
    assert quoted(value) == repr(value)


@pytest.mark.parametrize(
    "text",
    ["\x1b]0;owned\x07", "\x1b[2J", "a\nb", "\x9b31m", "\u202eabc", "\ud800", "\r", "\u2028"],
    ids=ascii,
)
def test_nothing_in_a_value_reaches_the_terminal(text: str) -> None:
    class Odd:
        def __repr__(self) -> str:
            return text

    for value in (text, [text], {text: text}, Odd()):
        written = quoted(value)
        assert written.isprintable()
        written.encode()
    assert printable(text).replace("\n", "").isprintable()
    printable(text).encode()


def test_lines_stay_lines_where_a_whole_text_is_printed() -> None:
    assert printable("two\nlines\x1b") == "two\nlines\\x1b"


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10**8,
        b"x" * 10**8,
        1 << 30_000_000,
        -(1 << 30_000_000),
        list(range(10**6)),
        dict.fromkeys(range(10**6)),
        [[[["x" * 1000] * 1000] * 1000] * 1000] * 1000,
        nested(100_000),
    ],
    ids=["text", "bytes", "number", "negative", "list", "table", "lists", "nested"],
)
def test_a_huge_value_is_cut_and_takes_no_time(value: object) -> None:
    before = time.perf_counter()
    assert len(quoted(value)) <= 120
    assert len(quoted(value, most=30)) <= 30
    assert time.perf_counter() - before < 0.5


def test_a_long_text_keeps_its_begin_and_its_end() -> None:
    written = quoted("begin" + "x" * 1000 + "end")
    assert written.startswith("'begin")
    assert written.endswith("end'")


def test_a_text_of_several_lines_is_put_on_one() -> None:
    assert line("begin\n\x1b" + "x" * 1000 + "end", most=50).startswith("begin\\n\\x1b")
    assert len(line("x" * 10**7)) <= 400


def test_a_value_that_cannot_be_written_is_named_by_its_class() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    assert quoted(Broken()) == "<Broken>"
