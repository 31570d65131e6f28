"""Writes every option or field of a dataclass: its name, its type and default, and the text below it."""

from __future__ import annotations

from .texts import cell, described_fields, paragraph, thing


def write(path: str, prefix: str = "", level: str = "3") -> str:
    """One section for each option. ``prefix`` stands before its name, as in ``offload.moments``."""
    lines = []
    for option in described_fields(thing(path)):
        lines += [
            f"{'#' * int(level)} `{prefix}{option.name}`",
            "",
            f"`{option.kind}`" + ("" if option.default is None else f", by default `{option.default}`."),
            "",
            paragraph(option.text),
            "",
        ]
    return "\n".join(lines)


def write_fields(path: str) -> str:
    """One row for each field, for classes whose fields are read."""
    lines = ["| field | meaning |", "|---|---|"]
    lines += [f"| `{field.name}` | {cell(paragraph(field.text))} |" for field in described_fields(thing(path))]
    return "\n".join(lines)
