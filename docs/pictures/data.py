"""Reads the measurements that the pictures show. Each file says where its numbers come from."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Final, NamedTuple

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
DATA: Final = HERE / "data"


class About(NamedTuple):
    """Where numbers come from."""

    command: str
    machine: str
    commit: str

    def __str__(self) -> str:
        return f"{self.machine}, commit {self.commit}: {self.command}"


def read(name: str) -> tuple[About, dict[str, Any]]:
    """A file of `data/`: where it comes from, and all that it holds.

    Raises:
        ValueError: the file does not say which command, machine and commit made it.
    """
    content = json.loads((DATA / f"{name}.json").read_text())
    about = content.get("about") or {}
    missing = [field for field in About._fields if not about.get(field)]
    if missing:
        raise ValueError(f'{name}.json: add {", ".join(missing)} to its "about", so that the picture can say them')
    return About(*(about[field] for field in About._fields)), content


def write(name: str, about: About, content: dict[str, Any]) -> None:
    """Writes a file of `data/`, with a line for each of its entries."""
    entries = {"about": about._asdict(), **content}
    rows = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items())
    (DATA / f"{name}.json").write_text(f"{{\n{rows}\n}}\n")


def commit() -> str:
    """The commit of this checkout."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
