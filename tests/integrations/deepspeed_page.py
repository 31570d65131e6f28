"""The table of ``docs/reference/deepspeed.md``. ``python -m tests.integrations.deepspeed_page`` writes it."""

from __future__ import annotations

import re
from pathlib import Path

from zeroshard.integrations.deepspeed import keys

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "deepspeed.md"
TABLE = re.compile(r"(?<=<!-- table -->\n).*(?=<!-- end of table -->)", re.DOTALL)


def table() -> str:
    """Every key, what happens, and why. Keys that share a reason share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, key in keys().items():
        rows.setdefault((key.what, key.why), []).append(f"`{name}`")
    order = sorted(rows, key=lambda row: ("mapped", "accepted", "refused").index(row[0]))
    lines = [f"| {', '.join(rows[row])} | {row[0]} | {row[1]} |" for row in order]
    return "\n".join(["", "| key | what happens | why |", "|---|---|---|", *lines, "\n"])


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
