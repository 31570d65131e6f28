"""The messages on the page of errors are those of the package."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.docs.pages import DOCS, ROOT

PAGE = (DOCS / "reference" / "errors.md").read_text()
MESSAGES = re.findall(r"^\| `(.+?)` \| ", PAGE, re.MULTILINE)
PLACE = "…"
"""On the page: stands for what differs from error to error."""


@cache
def texts_of_the_package() -> list[str]:
    """Every string in the package's code. What an f-string fills in is a `PLACE`."""
    found = []
    for file in sorted((ROOT / "zeroshard").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else PLACE for part in node.values)
                found.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"\{[a-z_]*\}", PLACE, node.value))
    return found


def test_the_page_has_messages() -> None:
    assert len(MESSAGES) > 50


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_that_the_package_writes(message: str) -> None:
    parts = [part for part in message.split(PLACE) if part.strip(" .,:;()'")]
    assert parts
    assert any(_in_order(parts, text) for text in texts_of_the_package()), f"no text of the package has {parts}"


def _in_order(parts: list[str], text: str) -> bool:
    place = 0
    for part in parts:
        found = text.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return True
