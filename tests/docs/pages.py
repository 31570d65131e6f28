"""Reads the pages of the documentation: their blocks of code, headings and links.

The language of a block decides how it is checked, and comments right above the block say what it needs:

| block | checked by `make test` | run by `make test-all` |
|---|---|---|
| `python` | it compiles; every name of `zeroshard` and every option in it exists | as a program, on one CPU rank |
| `bash` | each line is a command; its program, options and files exist | small; below `<!-- run -->` as it is |
| `toml` | it is a configuration without mistakes | |
| `json` | each line is a document to fine-tune on | |
| `diff` | both sides compile, as `python` | both sides, as programs |
| `text` | a `<!-- drawing -->` or an `<!-- output … -->` | an `<!-- output -->`: the block above has its words |

Comments above a `python` or `diff` block: `<!-- given: model, batch -->` (names that `given.py` defines first),
`<!-- continued -->` (the program goes on from the one before), `<!-- ranks: 2 -->` (started by torchrun), and
`<!-- raises: words -->` (it ends with an error that has these words). Above a `bash` block, `<!-- continued -->` runs
the program before it first, in the same folder. `<!-- output of COMMAND, where -->` is for output of what runs too
long, or needs a GPU: the command is checked. Another language or comment is an error: nothing is skipped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from from_code import filled, project

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LANGUAGES = ("python", "bash", "toml", "json", "diff", "text")
COMMENTS = {
    "python": ("given", "continued", "ranks", "raises"),
    "diff": ("given", "ranks"),
    "bash": ("run", "continued"),
    "toml": (),
    "json": (),
    "text": ("output", "drawing"),
}
"""The comments that a block of each language may have."""
FENCE = re.compile(
    r"^(?P<comments>(?:<!-- .+? -->\n+)*)(?P<indent> *)```(?P<language>\S*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
COMMENT = re.compile(r"<!-- (\w+)(?:: | )?(.*?) -->")


@dataclass(frozen=True, eq=False)
class Block:
    """One block of code of a page."""

    page: Path
    line: int
    language: str
    text: str
    needs: dict[str, str] = field(default_factory=dict)
    """The comments above it: the word, and what follows it."""
    before: Block | None = None
    """The block above it on the page."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def program(self) -> str:
        """The code, and that of the blocks which it continues."""
        if "continued" in self.needs:
            assert self.before is not None, f"{self} continues nothing"
            return f"{self.before.program}\n{self.text}"
        return self.text

    @property
    def first(self) -> Block:
        """The block in which the program begins."""
        return self.before.first if "continued" in self.needs and self.before is not None else self

    def side(self, sign: str) -> str:
        """The program before (`-`) or after (`+`) the change that a `diff` shows."""
        lines = self.text.splitlines()
        return "\n".join(line[1:] for line in lines if line[:1] in (" ", sign, "") and not line.startswith("@@"))


def pages() -> list[Path]:
    """The README and every page of the documentation, without the copies of pages that stand elsewhere."""
    written = [page for page in DOCS.rglob("*.md") if not {"_build", "project"} & set(page.parts)]
    return [ROOT / "README.md", *sorted(written)]


def all_pages() -> list[Path]:
    """Every page of the project, also those whose code belongs to other tests."""
    return [*pages(), *(ROOT / other for other in project.PAGES)]


@cache
def blocks_of(page: Path) -> tuple[Block, ...]:
    """The blocks of a page that a person wrote; not those of the generated reference, nor Sphinx's own directives."""
    text, found = page.read_text(), []
    before: Block | None = None
    for match in FENCE.finditer(text):
        language = match["language"]
        if language.startswith("{"):
            continue
        line = text.count("\n", 0, match.start("language")) + 1
        needs = {word: rest for word, rest in COMMENT.findall(match["comments"]) if word != "from"}
        indent = len(match["indent"])
        body = "".join(line[indent:] for line in match["text"].splitlines(keepends=True))
        previous = before
        if "continued" in needs:  # output may stand between two parts of a program
            previous = next(block for block in reversed(found) if block.language == "python")
        before = Block(page, line, language, body, needs, previous)
        found.append(before)
    return tuple(found)


def blocks(language: str) -> list[Block]:
    """The blocks of all pages in this language."""
    return [block for page in pages() for block in blocks_of(page) if block.language == language]


def prose(page: Path) -> str:
    """A page as it is built, with the generated parts, and without its blocks."""
    return FENCE.sub("", filled(page.read_text()))


def commands(text: str) -> Iterator[str]:
    """The commands of a block: its lines without comments, with continued lines joined."""
    for line in text.replace("\\\n", " ").splitlines():
        command = re.sub(r"(^|\s)#\s.*", "", line).strip()
        if command:
            yield command
