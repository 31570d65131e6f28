"""Removes checkpoints so that a crash in the middle leaves nothing that nobody knows.

A folder takes a hidden name before its files go. By that name nobody loads it, and the next save finishes the removal.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from .format import MARKER, OWN_NAME

_REMOVING = re.compile(r"\.zeroshard\.[0-9a-f]{16}\.removing")


def is_being_removed(folder: Path) -> bool:
    """Whether what is in a folder is as good as gone."""
    return _REMOVING.fullmatch(folder.name) is not None


def entries_of(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, by name."""
    return sorted(os.scandir(folder), key=lambda entry: entry.name)


def is_own(entry: os.DirEntry[str]) -> bool:
    """Whether a save may have written this into a checkpoint's folder."""
    return OWN_NAME.fullmatch(entry.name) is not None and entry.is_file(follow_symlinks=False)


def remove(folder: Path) -> None:
    """Removes a checkpoint. What else somebody has put there stays, and its folder, under its own name then."""
    if all(map(is_own, entries_of(folder))):
        hidden = folder.with_name(f".zeroshard.{secrets.token_hex(8)}.removing")
        os.rename(folder, hidden)
        folder = hidden
    _empty(folder)


def finish_removals(parent: Path) -> None:
    """Goes on where a crash has interrupted a removal; no harm where it is still going on."""
    with contextlib.suppress(OSError):
        for entry in entries_of(parent):
            if is_being_removed(Path(entry.path)) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _empty(Path(entry.path))


def _empty(folder: Path) -> None:
    """The marker goes first: what lacks a file must not look complete."""
    (folder / MARKER).unlink(missing_ok=True)
    for entry in entries_of(folder):  # by which a rank's files go late: as long as one is there, all are known as ours
        if is_own(entry):
            Path(entry.path).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty
        os.rmdir(folder)
