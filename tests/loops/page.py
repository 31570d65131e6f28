"""The tables of ``docs/how-to/loops.md``, from the corpus. ``python -m tests.loops.page`` writes them into the page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tests.loops.harness import Refusal
from tests.loops.table import LOOPS

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "loops.md"
TABLES = re.compile(r"(?<=<!-- tables -->\n).*(?=<!-- end of tables -->)", re.DOTALL)


def tables() -> str:
    """What works unchanged, what needs a line, and what is refused."""
    refusals = [(loop.title, refusal) for loop in LOOPS.values() for refusal in loop.refusals]
    unchanged = [loop.title for loop in LOOPS.values() if not loop.refusals]
    lines = [f"| {title} | {_where(refusal)} | {refusal.line} |" for title, refusal in refusals if refusal.line]
    refused = [f"| {title} | {_where(refusal)} |" for title, refusal in refusals if not refusal.line]
    return "\n".join(
        [
            f"\nOf {len(LOOPS)} loops, {len(unchanged)} work unchanged in every stage and with offload.",
            "\n## Works unchanged\n",
            *(f"- {title}" for title in unchanged),
            "\n## Needs a line\n",
            "| loop | where | the line |",
            "|---|---|---|",
            *lines,
            "\n## Refused\n",
            "| loop | where |",
            "|---|---|",
            *refused,
            "\n",
        ]
    )


def _where(refusal: Refusal) -> str:
    """In which settings a loop is refused.

    >>> from tests.loops.harness import OFFLOAD, STAGE_3
    >>> _where(Refusal(STAGE_3 | OFFLOAD, ""))
    'stage 3, offload'
    >>> _where(Refusal(OFFLOAD - STAGE_3, ""))
    'offload in stages 0, 1, 2'
    """
    plain = sorted(setting.stage for setting in refusal.where if not setting.offload)
    offload = sorted(setting.stage for setting in refusal.where if setting.offload)
    if len(plain) == 4:
        return "every stage"
    parts = [_stages(plain)] if plain else []
    if len(offload) == 4:
        parts.append("offload")
    elif offload != plain:
        parts.append(f"offload in {_stages(offload)}")
    return ", ".join(parts)


def _stages(numbers: Iterable[int]) -> str:
    numbers = list(numbers)
    return f"stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


if __name__ == "__main__":
    PAGE.write_text(TABLES.sub(lambda _: tables(), PAGE.read_text()))
