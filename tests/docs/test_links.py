"""Links of every page lead somewhere. Nothing is asked over the network: addresses elsewhere must be known."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from from_code import filled

import zeroshard
from tests.docs.commands import known_options
from tests.docs.pages import DOCS, FENCE, ROOT, all_pages, pages, prose

HOSTS = {"arxiv.org", "download.pytorch.org", "pytorch.org", "semver.org", "ui.perfetto.dev"}
"""Where a page may link to. Look at an address yourself before you add its host."""
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
IMAGE = re.compile(r'!\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"')
OTHER_OPTIONS = {"--help", "--die-at", "--logdir"}
"""Options of other programs that pages name."""


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", all_pages(), ids=named)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The names by which a link can reach a heading, as GitHub and MyST make them."""
    found: dict[str, int] = {}
    names = set()
    for title in re.findall(r"^#+ (.+)$", FENCE.sub("", filled(page.read_text())), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"`", "", title).strip().lower()).replace(" ", "-")
        seen = found.get(slug, 0)
        found[slug] = seen + 1
        names.add(f"{slug}-{seen}" if seen else slug)
    return frozenset(names)


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    targets = [*LINK.findall(text), *(first or second for first, second in IMAGE.findall(text))]
    for target in targets:
        parts = urlsplit(target)
        if parts.scheme:
            assert parts.scheme == "https", f"{target} is not https"
            assert parts.hostname in HOSTS, f"{target}: a host that nobody has looked at; see HOSTS"
            continue
        there = (page.parent / parts.path).resolve() if parts.path else page
        assert there.exists(), f"{named(page)} links to {target}, which is not there"
        if parts.fragment:
            assert parts.fragment in anchors(there), f"{target}: no such heading; headings: {sorted(anchors(there))}"


@pytest.mark.parametrize("page", pages(), ids=named)
def test_every_name_of_the_library_in_the_prose_exists(page: Path) -> None:
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page)):
        if match := re.match(r"zeroshard\.(\w+)", code):
            there = hasattr(zeroshard, match[1]) or (ROOT / "zeroshard" / match[1]).exists()
            assert there, f"{named(page)} names {code}"
        ours = not re.search(r"\bpython\b", code)  # each script has options of its own
        for option in re.findall(r"(?:^|\s)(--[a-z][\w-]+)", code) if ours else ():
            assert option in known_options() | OTHER_OPTIONS, f"{named(page)} names {option}"
        for path in re.findall(r"^((?:zeroshard|tests|examples|benchmarks|docs)/[\w/.-]*\w)$", code) + re.findall(
            r"python (\S+\.py)", code
        ):
            assert (ROOT / path).exists(), f"{named(page)} names {path}"


def test_every_page_of_the_documentation_is_in_its_contents() -> None:
    listed = set(re.findall(r"^([a-z-]+/[a-z0-9-]+)$", (DOCS / "index.md").read_text(), re.MULTILINE))
    there = {
        page.relative_to(DOCS).as_posix().removesuffix(".md")
        for page in DOCS.rglob("*/*.md")
        if "_build" not in page.parts
    }
    assert listed == there
