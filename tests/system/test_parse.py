"""JSON and TOML of others: whatever is wrong with them is one line."""

from __future__ import annotations

import re

import pytest

from zeroshard.system.parse import parse_json, parse_toml

DEEP = 100_000


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "not JSON: Expecting"),
        (b"[" * DEEP, "not JSON: it is nested too deep"),
        (b'{"a":' * DEEP, "not JSON: it is nested too deep"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "not JSON: a table has the key 'b' twice"),
        (b'{"\\u001b[2J": 1, "\\u001b[2J": 1}', "not JSON: a table has the key '\\x1b[2J' twice"),
        (b"1" * 5000, "not JSON: Exceeds the limit"),
        (b'"\xff"', "not JSON: byte 1 is not UTF-8"),
        (b"", "not JSON: Expecting"),
    ],
    ids=lambda value: ascii(value[:12]),
)
def test_json_that_cannot_be_read_is_one_line(content: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(told)}") as caught:
        parse_json(content)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[model", "not TOML: Expected"),
        (b"a = " + b"[" * 3_000, "not TOML: it is nested too deep"),
        (b"a = " + b"{a = " * 799, "not TOML: it is nested too deep"),
        (b"b = 1\na = " + b"1" * 5000, "line 2 has more than 4,000 bytes"),
        (b"a." * DEEP + b"a = 1", "line 1 has more than 4,000 bytes"),
        (b"a = '\xff'", "not TOML: byte 5 is not UTF-8"),
        (b"a = '\x1b[2J'", "not TOML: Found invalid character"),
        (b'a = 1\n"a" = 2', "not TOML: Cannot overwrite"),
    ],
    ids=lambda value: ascii(value[:12]),
)
def test_toml_that_cannot_be_read_is_one_line(content: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(told)}") as caught:
        parse_toml(content)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_a_mark_of_the_byte_order_is_no_part_of_json() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
