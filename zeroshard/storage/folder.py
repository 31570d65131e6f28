"""Folders of checkpoints: where a new one is written, which is the newest that is complete, and which may go.

A checkpoint is written under a hidden name and takes its own when it is complete, so that one that is overwritten is
there until the new one is. Whatever a crash leaves, of the two one is complete.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .claim import Claim, is_forgotten
from .format import MARKER, CheckpointError
from .marker import LATEST_NS, Marker, has_marker, read_marker
from .removal import entries_of, finish_removals, is_being_removed, is_own, remove
from .write import sync_folder

PARTIAL = ".partial"
OLD = ".old"
_ANY_PARTIAL = re.compile(rf"\..+\.[0-9a-f]{{16}}{re.escape(PARTIAL)}")


class Complete(NamedTuple):
    """A complete checkpoint."""

    folder: Path
    marker: Marker


def partial_of(path: Path, token: str) -> Path:
    """Where a checkpoint is written before it is complete: no two saves share it, even to one path."""
    return path.with_name(f".{path.name}.{token}{PARTIAL}")


def _old_of(path: Path) -> Path:
    return path.with_name(f".{path.name}{OLD}")


def _partials_of(path: Path) -> list[Path]:
    """What saves to this path have left, or still write."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]+{re.escape(PARTIAL)}")
    try:
        return [path.with_name(name) for name in sorted(os.listdir(path.parent)) if pattern.fullmatch(name)]
    except OSError:
        return []


def _complete_partials_of(path: Path) -> list[Path]:
    """Those that lack nothing but the name, the newest first."""
    return [one.folder for one in _Marked.of(_partials_of(path)).complete]


def check_replaceable(path: Path) -> None:
    """A save takes the place of a checkpoint, or of an empty folder, and of nothing else.

    Raises:
        CheckpointError: something else is there, which a save would have to delete.
    """
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link, which a save would replace; save to {path.resolve()} itself")
    if not path.exists():
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file, and a checkpoint is a folder; save to another path")
    entries = entries_of(path)
    foreign = [entry.name for entry in entries if not is_own(entry)]
    if not foreign and not any(entry.name == MARKER or entry.name.startswith("rank-") for entry in entries):
        foreign = [entry.name for entry in entries]  # a lone "token" or "index.json" is likely somebody else's
    if foreign:
        raise CheckpointError(
            f"{path} holds {foreign[0]!r}, which is no part of a checkpoint, and a save would delete it; save to a "
            f"path of its own, such as {path / 'step-1'}"
        )


def prepare(path: Path, token: str) -> Claim:
    """Makes an empty folder to write into, and claims it; on rank 0. What a crash left beside it goes.

    Raises:
        CheckpointError: another job is writing to this path, or something is there that is no checkpoint.
    """
    check_replaceable(path)
    finish_removals(path.parent)
    partial = partial_of(path, token)
    partial.mkdir(parents=True)
    try:
        claim = Claim(partial)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(partial)
        raise
    try:
        claim.check_alone(path, [one for one in _partials_of(path) if one != partial])
        left = [one for one in _complete_partials_of(path) if claim.supersedes(one)]
        if left and not path.exists():  # a crash between two renames
            os.replace(left[0], path)
        for folder in filter(claim.supersedes, _partials_of(path)):
            with contextlib.suppress(OSError):
                remove(folder)
    except BaseException:
        discard(claim)
        raise
    return claim


def discard(claim: Claim) -> None:
    """Ends a save that did not begin; on rank 0."""
    claim.release()
    with contextlib.suppress(OSError):
        remove(claim.folder)


def clear(partial: Path) -> None:
    """Removes what a save that failed has written; on rank 0, when no rank writes any more.

    Not if it lacks nothing but its name: that is a checkpoint, and ``load()`` finds it.
    """
    try:
        complete = read_marker(partial) is not None
    except CheckpointError:  # then that is why it failed
        complete = False
    if not complete:
        with contextlib.suppress(OSError):
            remove(partial)


def publish(partial: Path, path: Path) -> None:
    """Gives a complete checkpoint its name; on rank 0. The one that had it before goes."""
    check_replaceable(path)
    old = _old_of(path)
    if path.exists():
        if old.exists():
            check_replaceable(old)
            remove(old)
        os.replace(path, old)
    os.replace(partial, path)
    sync_folder(path.parent)
    with contextlib.suppress(OSError):
        remove(old)


class _Marked(NamedTuple):
    """Folders that have a marker."""

    complete: list[Complete]
    """The newest first."""
    damaged: list[Path]
    """Of these nobody knows how new they are."""

    @classmethod
    def of(cls, folders: Iterable[Path]) -> _Marked:
        made = cls([], [])
        for folder in folders:
            try:
                if (marker := read_marker(folder)) is not None:
                    made.complete.append(Complete(folder, marker))
            except CheckpointError:
                made.damaged.append(folder)
        made.complete.sort(key=lambda one: (one.marker.saved_ns, one.marker.steps), reverse=True)
        return made

    @classmethod
    def inside(cls, parent: Path) -> _Marked:
        """Those in a folder of checkpoints; raises OSError."""
        folders = [Path(entry.path) for entry in entries_of(parent) if entry.is_dir(follow_symlinks=False)]
        return cls.of(folder for folder in folders if not is_being_removed(folder))


def complete_in(parent: Path) -> list[Complete]:
    """The complete checkpoints in a folder, the newest first."""
    try:
        return _Marked.inside(parent).complete
    except OSError:
        return []


def candidates(path: Path) -> list[Path]:
    """What ``load(path)`` may read, the best first: the checkpoint itself, or those inside a folder of them.

    One whose marker is damaged comes before all others, as it may be the newest: reading it raises and names it.

    Raises:
        CheckpointError: what is in the folder cannot be listed.
    """
    partials = _Marked.of(_partials_of(path))
    left = (*partials.damaged, *(one.folder for one in partials.complete), _old_of(path))
    for folder in (path, *left):  # all but the first after a crash
        if has_marker(folder):
            return [folder]
    try:
        marked = _Marked.inside(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return [*marked.damaged, *(one.folder for one in marked.complete)]


def time_after(parent: Path, now_ns: int) -> int:
    """The time of a new checkpoint: later than those that are there, also where a clock was set back."""
    return min(LATEST_NS, max([now_ns, *(one.marker.saved_ns + 1 for one in complete_in(parent))]))


def keep_newest(path: Path, count: int) -> None:
    """Of the complete checkpoints beside the one just saved, leaves it and the newest others; on rank 0.

    What killed saves to other paths have left incomplete goes too; what somebody writes there stays.
    """
    others = [one.folder for one in complete_in(path.parent) if one.folder != path]
    for folder in [*others[count - 1 :], *_incomplete_in(path.parent)]:
        with contextlib.suppress(OSError):
            if not _ANY_PARTIAL.fullmatch(folder.name) or is_forgotten(folder, path):
                remove(folder)


def _incomplete_in(parent: Path) -> list[Path]:
    """What saves to whatever path have left, or still write."""
    try:
        names = [entry.name for entry in entries_of(parent) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [parent / name for name in names if _ANY_PARTIAL.fullmatch(name) and not has_marker(parent / name)]
