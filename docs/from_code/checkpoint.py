"""Writes the format of a checkpoint, from the texts of ``zeroshard/storage/format.py``."""

from __future__ import annotations

import textwrap

from zeroshard.storage import format as form

from .texts import paragraph, text_of_constant

KINDS = ("VALUE", "SHOWN", "BUFFER", "_STATE")


def write_files() -> str:
    """The files of a checkpoint, as the first lines of the module show them."""
    assert form.__doc__ is not None
    drawing, *rest = textwrap.dedent(form.__doc__.partition("\n")[2]).strip("\n").split("\n\n")
    return "\n\n".join(["```text\n" + textwrap.dedent(drawing) + "\n```", *map(paragraph, rest[:-1])])


def write_kinds() -> str:
    """What each kind of range is."""
    lines = ["| kind | meaning |", "|---|---|"]
    for name in KINDS:
        shown = getattr(form, name) + ("NAME" if name == "_STATE" else "")
        lines.append(f"| `{shown}` | {paragraph(text_of_constant(form, name))} |")
    return "\n".join(lines)
