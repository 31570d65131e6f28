"""Brings pages that stand elsewhere in the project into the documentation, and turns links to them."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    "benchmarks/RESULTS.md": "results",
    "examples/README.md": "examples",
    "SECURITY.md": "security",
    "CONTRIBUTING.md": "contributing",
    "CHANGELOG.md": "changelog",
}
"""The pages, and their names in `docs/project/`."""
LINK = re.compile(r"\[(?P<words>[^\]]*)\]\((?P<path>[^)\s#:]*)(?P<anchor>#[^)\s]*)?\)")

FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def write(file: str) -> str:
    """A page of the project, with its links as they are from `docs/project/`."""
    return relinked((ROOT / file).read_text(), ROOT / file, DOCS / "project" / "page.md")


def relinked(text: str, source: Path, page: Path) -> str:
    """The text of a file, as it is on a page of the documentation.

    Links to pages of the project lead to their copies in the documentation. A link to a file that is no page loses its
    address and keeps its words.
    """

    def turned(link: re.Match[str]) -> str:
        if not link["path"]:
            return link[0]
        there = (source.parent / link["path"]).resolve()
        name = there.relative_to(ROOT).as_posix() if there.is_relative_to(ROOT) else ""
        if name in PAGES:
            there = DOCS / "project" / f"{PAGES[name]}.md"
        elif not there.is_relative_to(DOCS):
            return link["words"]
        return f"[{link['words']}]({os.path.relpath(there, page.parent)}{link['anchor'] or ''})"

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(turned, part) for part in parts)
