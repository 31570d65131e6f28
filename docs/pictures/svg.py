"""Draws simple pictures as SVG that read well on light and on dark pages, in an ``<img>`` too.

A file has its own background, so that it can be read where browser and page disagree about dark mode. Colours are
classes with one value for light and one for dark. Colours that touch differ in brightness too, for people who see few
hues. The title and the description are what a screen reader says.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Final

WIDTH: Final = 700
"""Of all pictures: what a README's column shows without shrinking the text."""
FONT: Final = "-apple-system, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', Helvetica, Arial, sans-serif"
LETTER: Final = 0.54  # of the font size: how wide a letter is on average, in wide fonts too

COLOURS: Final[Mapping[str, tuple[str, str]]] = {
    "page": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "quiet": ("#59636e", "#9ba3ad"),
    "rule": ("#d1d9e0", "#333b45"),
    "blue": ("#0072b2", "#4ba3e3"),
    "pale": ("#8cc4e8", "#1f5f8f"),
    "orange": ("#e69f00", "#f0b429"),
    "green": ("#009e73", "#1fa67e"),
    "grey": ("#8a939c", "#7d8590"),
    "sky": ("#8cc4e8", "#4ba3e3"),
    "mint": ("#7ed3b5", "#1fa67e"),
    "faint": ("#e4e8ec", "#242b33"),
    "label": ("#1f2328", "#0d1117"),
}
"""By role: on a light page, on a dark page. A `label` is readable on boxes of sky, mint and orange."""


class Drawing:
    """One picture. Draw into it from back to front, then ask for its text."""

    def __init__(self, height: float, title: str, description: str) -> None:
        self._height, self._title, self._description = height, title, description
        self._body: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, colour: str, hint: str = "") -> None:
        """A filled rectangle. ``hint`` is shown where the pointer rests, if the file is opened by itself."""
        inside = f"><title>{escape(hint)}</title></rect>" if hint else "/>"
        place = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
        self._body.append(f'<rect class="{colour}" {place}{inside}')

    def line(self, x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> None:
        """A thin line of the colour of rules."""
        style = ' stroke-dasharray="3 3"' if dashed else ""
        ends = f'x1="{_number(x1)}" y1="{_number(y1)}" x2="{_number(x2)}" y2="{_number(y2)}"'
        self._body.append(f'<line class="rule" {ends}{style}/>')

    def text(
        self,
        x: float,
        y: float,
        words: str,
        colour: str = "ink",
        *,
        size: float = 13,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """A line of text with its baseline at ``y``."""
        weight = ' font-weight="600"' if bold else ""
        place = f'x="{_number(x)}" y="{_number(y)}" font-size="{_number(size)}" text-anchor="{anchor}"'
        self._body.append(f'<text class="{colour}" {place}{weight}>{escape(words, quote=False)}</text>')

    def heading(self, subtitle: str) -> None:
        """The title, and a quiet line below it."""
        self.text(MARGIN, 26, self._title, size=16, bold=True)
        self.text(MARGIN, 46, subtitle, "quiet")

    def paragraph(self, y: float, words: str, *, size: float = 12) -> None:
        """Quiet text over the whole width, the first baseline at ``y``."""
        for number, row in enumerate(wrapped(words, size)):
            self.text(MARGIN, y + number * LEADING * size, row, "quiet", size=size)

    def legend(self, y: float, entries: Mapping[str, str], x: float) -> None:
        """Names with their colours, in a row that begins at ``x``."""
        for words, colour in entries.items():
            self.box(x, y - 10, 11, 11, colour)
            self.text(x + 16, y, words, size=12)
            x += 16 + 12 * LETTER * len(words) + 18

    def __str__(self) -> str:
        light = "".join(_rule(name, light) for name, (light, _) in COLOURS.items())
        dark = "".join(_rule(name, dark) for name, (_, dark) in COLOURS.items())
        size = f'viewBox="0 0 {WIDTH} {_number(self._height)}" width="{WIDTH}" height="{_number(self._height)}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title description">',
                f'<title id="title">{escape(self._title)}</title>',
                f'<desc id="description">{escape(self._description)}</desc>',
                f"<style>text{{font-family:{FONT}}}line{{stroke-width:1}}{light}",
                f"@media (prefers-color-scheme: dark){{{dark}}}</style>",
                f'<rect class="page" width="{WIDTH}" height="{_number(self._height)}"/>',
                *self._body,
                "</svg>\n",
            ]
        )


MARGIN: Final = 14
LEADING: Final = 1.4


def wrapped(words: str, size: float) -> list[str]:
    """Divides text into rows that fit between the margins.

    >>> wrapped("a row that is short", 12)
    ['a row that is short']
    """
    room = (WIDTH - 2 * MARGIN) / (size * LETTER)
    rows = [""]
    for word in words.split():
        longer = f"{rows[-1]} {word}".strip()
        if len(longer) > room and rows[-1]:
            rows.append(word)
        else:
            rows[-1] = longer
    return rows


def paragraph_height(words: str, *, size: float = 12) -> float:
    """How much a paragraph needs below its first baseline, with a margin."""
    return (len(wrapped(words, size)) - 1) * LEADING * size + MARGIN


def _rule(name: str, colour: str) -> str:
    return f".{name}{{stroke:{colour}}}" if name == "rule" else f".{name}{{fill:{colour}}}"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
