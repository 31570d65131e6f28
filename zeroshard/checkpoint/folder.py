"""Folders of checkpoints: where a new one is written, which is the newest that is complete, and which may go.

A checkpoint is written under a hidden name and takes its own when it is complete, so that one that is overwritten is
there until the new one is. Whatever a crash leaves, of the two one is complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from .format import MARKER, Marker, read_marker
from .write import sync_folder

PARTIAL = ".partial"
OLD = ".old"


class Complete(NamedTuple):
    """A complete checkpoint."""

    folder: Path
    marker: Marker


def partial_of(path: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return path.with_name(f".{path.name}{PARTIAL}")


def _old_of(path: Path) -> Path:
    return path.with_name(f".{path.name}{OLD}")


def prepare(path: Path) -> Path:
    """Makes an empty folder to write into; on rank 0. What a crash left there goes."""
    partial = partial_of(path)
    if (partial / MARKER).exists() and not path.exists():  # a crash between two renames
        os.replace(partial, path)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    sync_folder(partial.parent)
    return partial


def publish(path: Path) -> None:
    """Gives a complete checkpoint its name; on rank 0. What had it before goes."""
    old = _old_of(path)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.replace(path, old)
    os.replace(partial_of(path), path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def complete_in(parent: Path) -> list[Complete]:
    """The complete checkpoints in a folder, the newest first."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(parent):
            if entry.is_dir(follow_symlinks=False):
                marker = read_marker(Path(entry.path))
                if marker is not None:
                    found.append(Complete(Path(entry.path), marker))
    return sorted(found, key=lambda one: (one.marker.saved_ns, one.marker.steps), reverse=True)


def candidates(path: Path) -> list[Path]:
    """What ``load(path)`` may read, the best first: the checkpoint itself, or those inside a folder of them."""
    for folder in (path, partial_of(path), _old_of(path)):  # the latter two after a crash between two renames
        if (folder / MARKER).exists():
            return [folder]
    return [one.folder for one in complete_in(path)]


def keep_newest(parent: Path, count: int) -> None:
    """Removes all complete checkpoints but the newest; on rank 0, after a save. The marker goes first."""
    for one in complete_in(parent)[count:]:
        with contextlib.suppress(OSError):
            os.remove(one.folder / MARKER)
            shutil.rmtree(one.folder)
