"""Writes the parts of the reference that follow from the code, so that they cannot differ from it.

A page asks for such a part with a comment on a line of its own: ``<!-- from code: options zeroshard.Config -->``. The
word after the colon names a writer below, the rest are its arguments. ``conf.py`` fills the comments in when Sphinx
reads a page; the tests of the pages do the same. Nothing here needs Sphinx. A thing without a text is an error.
"""

from __future__ import annotations

import re

from . import checkpoint, commands, machines, options, presets, project

WRITERS = {
    "options": options.write,
    "fields": options.write_fields,
    "commands": commands.write,
    "machines": machines.write,
    "machine-fields": machines.write_fields,
    "checkpoint-kinds": checkpoint.write_kinds,
    "checkpoint-files": checkpoint.write_files,
    "presets": presets.write,
    "page": project.write,
}
ASKED = re.compile(r"^<!-- from code: (.+?) -->$", re.MULTILINE)


def filled(text: str) -> str:
    """Returns a page with the generated parts in place of the comments that ask for them.

    Raises:
        ValueError: there is no such part, or something in the code has no text.
    """

    def written(asked: re.Match[str]) -> str:
        name, *arguments = asked[1].split()
        if name not in WRITERS:
            raise ValueError(f"{asked[0]} asks for a part that nobody writes; known: {', '.join(WRITERS)}")
        return WRITERS[name](*arguments)

    return ASKED.sub(written, text)
