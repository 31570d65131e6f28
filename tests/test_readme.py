"""The README is short, begins with the two commands, and leads to every page. `tests/docs` checks code and links."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import DOCS, blocks_of

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXT = README.read_text()
LONGEST = 150


def test_the_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= LONGEST


def test_the_two_commands_come_first() -> None:
    commands = [line.split("#")[0].strip() for line in blocks_of(README)[0].text.splitlines()]
    assert commands == ["make train", "make test"]


def test_the_program_has_about_ten_lines_and_runs_with_the_other_pages() -> None:
    (program,) = [block for block in blocks_of(README) if block.language == "python"]
    assert 8 <= len([line for line in program.text.splitlines() if line and not line.startswith("import")]) <= 12
    assert not program.needs  # it runs as it is


def test_the_readme_leads_to_every_page_that_a_person_wrote() -> None:
    linked = {(ROOT / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)\)", TEXT)}
    for part in ("tutorials", "how-to", "explanation", "reference"):
        for page in (DOCS / part).glob("*.md"):
            assert page in linked, f"no link to {page.relative_to(ROOT)}"


def test_every_figure_of_the_comparison_is_in_the_results() -> None:
    table = TEXT.partition("<!-- comparison")[2].partition("\n1. ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    figures = re.findall(r"\d+\.\d+(?!\.)", " ".join(row.split("|", 2)[2] for row in rows))
    results = set(re.findall(r"\d+\.\d+", (ROOT / "benchmarks" / "RESULTS.md").read_text()))
    assert len(figures) > 20
    assert set(figures) <= results


def test_every_file_that_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`([\w/]+/[\w.]*\.(?:py|h))`", text)
    assert len(paths) > 40
    for path in paths:
        folders = (ROOT, ROOT / "zeroshard", ROOT / "zeroshard/offload")
        assert any((folder / path).exists() for folder in folders), path
