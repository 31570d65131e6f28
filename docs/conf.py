"""Settings of Sphinx. ``make docs`` builds the pages into ``docs/_build`` and takes every warning as an error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import from_code  # noqa: E402
from from_code.project import relinked  # noqa: E402

import zeroshard  # noqa: E402

project = "zeroshard"
author = "the authors of zeroshard"
version = release = zeroshard.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "pictures/*.md"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # links name headings as GitHub does: page.md#a-heading

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature would repeat the types of torch; the text says what is meant
autodoc_class_signature = "separated"
nitpicky = True

smartquotes = False  # "--offload" and "auto" are what one types

html_theme = "furo"
html_title = f"zeroshard {version}"
html_static_path: list[str] = []
html_show_copyright = False
templates_path: list[str] = []
highlight_language = "text"


def _write_from_code(app: Any, name: str, source: list[str]) -> None:
    page = Path(app.srcdir) / f"{name}.md"
    source[0] = relinked(from_code.filled(source[0]), page, page)


def setup(app: Any) -> None:
    """Fill in what is generated from the code before a page is read."""
    app.connect("source-read", _write_from_code)
