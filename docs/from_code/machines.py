"""Writes the machine profiles: what each number means, and each profile with the sources of its numbers."""

from __future__ import annotations

import ast
import json

from zeroshard.plan.machine import profile

from .texts import Described, cell, described_fields, paragraph

SECTIONS = {
    "": profile.Machine,
    "device": profile.Device,
    "inside": profile.Link,
    "between": profile.Link,
    "pcie": profile.Pcie,
    "host": profile.Host,
    "launch": profile.Launch,
}
"""The tables of a profile. The first is the top of the file."""


def write() -> str:
    """Each profile: its file, with the comments that name the sources."""
    lines = []
    for file in sorted(profile.FOLDER.glob("*.toml")):
        found = profile.load(file.stem)
        lines += [f"## {file.stem}", "", f"{found.title}.", "", "```toml", file.read_text().rstrip(), "```", ""]
    return "\n".join(lines)


def write_fields() -> str:
    """What each number of a profile means."""
    lines = ["| table | key | default | meaning |", "|---|---|---|---|"]
    for table, kind in SECTIONS.items():
        for field in described_fields(kind):
            if table or field.name not in (*SECTIONS, "name"):
                shown = "top of the file" if table == "" else f"`[{table}]`"
                lines.append(f"| {shown} | `{field.name}` | {_default(field)} | {cell(paragraph(field.text))} |")
    return "\n".join(lines)


def _default(field: Described) -> str:
    """A default as TOML writes it. Nothing if the key must be there."""
    if field.name == "title":
        return "the file's name"
    return "" if field.default is None else f"`{json.dumps(ast.literal_eval(field.default))}`"
