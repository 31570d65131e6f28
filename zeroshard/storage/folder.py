"""Folders of checkpoints: where a new one is written, which is the newest, which are removed.

A checkpoint is written under a hidden name, and takes its own name when it is complete. A checkpoint that is replaced
stays until then. After a crash at any moment, one of the two is complete.

A folder takes another hidden name before its files are removed. Nobody loads it by that name, and the next save
finishes a removal that a crash interrupted.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .claim import FolderClaim, is_claimed, is_left, is_own, refusal
from .format import CLAIM, LATEST_NS, MARKER, OWN_NAME, CheckpointError, Marker, has_marker, read_marker
from .write import sync_folder

_PARTIAL = re.compile(r"\.(.+)\.[0-9a-f]+\.partial")
_REMOVING = re.compile(r"\.zeroshard\.[0-9a-f]{16}\.removing")

# -- a new checkpoint -------------------------------------------------------------------------------------------------


def partial_of(path: Path, token: str) -> Path:
    """The folder in which a checkpoint is written before it is complete. No two saves share it, even to one path."""
    return path.with_name(f".{path.name}.{token}.partial")


def _partials_of(path: Path) -> list[Path]:
    """Folders of saves to this path: of saves that go on, and of saves that a crash has ended."""
    with contextlib.suppress(OSError):
        found = [(_PARTIAL.fullmatch(name), path.with_name(name)) for name in sorted(os.listdir(path.parent))]
        return [folder for match, folder in found if match is not None and match[1] == path.name]
    return []


def check_replaceable(path: Path) -> None:
    """A save may replace a checkpoint or an empty folder, and nothing else.

    Raises:
        CheckpointError: something else is there, which a save would have to delete.
    """
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link, which a save would replace; save to {path.resolve()} itself")
    if not path.exists():
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file, and a checkpoint is a folder; save to another path")
    entries = _entries_of(path)
    foreign = [entry.name for entry in entries if not _is_own(entry)]
    if not foreign and not any(entry.name == MARKER or entry.name.startswith("rank-") for entry in entries):
        foreign = [entry.name for entry in entries]  # a lone "claim" or "index.json" is likely somebody else's
    if foreign:
        raise CheckpointError(
            f"{path} holds {foreign[0]!r}, which is no part of a checkpoint, and a save would delete it; save to a "
            f"path of its own, such as {path / 'step-1'}"
        )


def prepare(path: Path, token: str) -> FolderClaim:
    """Makes an empty folder to write into, on rank 0. Removes what a crash has left beside it.

    Raises:
        CheckpointError: somebody is writing to this path, or something is there that is no checkpoint.
    """
    check_replaceable(path)
    _finish_removals(path.parent)
    claim = FolderClaim(partial_of(path, token))
    try:
        others = [folder for folder in _partials_of(path) if folder != claim.folder]
        for folder in filter(is_claimed, others):
            if is_own(folder):
                raise CheckpointError(f"{path} is still being written by another save; wait() for that one first")
            raise CheckpointError(refusal(path, folder))
        complete, _ = _sorted(others)
        if complete and _is_newer(complete[0], path):  # a save to this path ended before its last rename
            publish(complete[0].folder, path)
            (path / CLAIM).unlink(missing_ok=True)
        for folder in filter(Path.exists, others):
            with contextlib.suppress(OSError):
                remove(folder)
    except BaseException:
        discard(claim)
        raise
    return claim


def discard(claim: FolderClaim) -> None:
    """Gives up a claim, and removes what a save has written into the folder."""
    claim.release()
    with contextlib.suppress(OSError):
        remove(claim.folder)


def publish(partial: Path, path: Path) -> None:
    """Gives a complete checkpoint its name, on rank 0. Removes the checkpoint that had this name before."""
    check_replaceable(path)
    before, replaces = _hidden(path), path.exists()
    if replaces:
        os.rename(path, before)
    try:
        os.rename(partial, path)
    except BaseException:
        if replaces:
            os.rename(before, path)
        raise
    sync_folder(path.parent)
    with contextlib.suppress(OSError):
        _empty(before)


def clear(partial: Path) -> None:
    """Removes what a failed save has written, on rank 0, when no rank writes any more.

    A folder that is complete and only lacks its final name stays: it is a checkpoint, and ``load()`` finds it.
    """
    if not has_marker(partial):
        with contextlib.suppress(OSError):
            remove(partial)


# -- checkpoints that are there ---------------------------------------------------------------------------------------


class CompleteCheckpoint(NamedTuple):
    """A complete checkpoint."""

    folder: Path
    marker: Marker


def _sorted(folders: Iterable[Path]) -> tuple[list[CompleteCheckpoint], list[Path]]:
    """The complete checkpoints among folders, the newest first; and the folders with a damaged marker."""
    complete, damaged = [], []
    for folder in folders:
        try:
            if (marker := read_marker(folder)) is not None:
                complete.append(CompleteCheckpoint(folder, marker))
        except CheckpointError:
            damaged.append(folder)
    complete.sort(key=lambda one: (one.marker.saved_ns, one.marker.steps), reverse=True)
    return complete, damaged


def _folders_in(parent: Path) -> list[Path]:
    """The folders in a folder, without folders that are being removed. Raises OSError."""
    return [
        Path(entry.path)
        for entry in _entries_of(parent)
        if entry.is_dir(follow_symlinks=False) and not _REMOVING.fullmatch(entry.name)
    ]


def complete_in(parent: Path) -> list[CompleteCheckpoint]:
    """The complete checkpoints in a folder, the newest first."""
    try:
        return _sorted(_folders_in(parent))[0]
    except OSError:
        return []


def _is_newer(one: CompleteCheckpoint, path: Path) -> bool:
    """True if a checkpoint is newer than the one at the path, or there is no readable one."""
    complete, _ = _sorted([path, one.folder])
    return complete[0].folder == one.folder


def _is_final(folder: Path) -> bool:
    """False if a save still writes a folder and the checkpoint that it will replace is there: that one counts."""
    match = _PARTIAL.fullmatch(folder.name)
    return match is None or not has_marker(folder.with_name(match[1])) or not is_claimed(folder)


def candidates(path: Path) -> list[Path]:
    """The checkpoints that ``load(path)`` may read, the best first: the path itself, or the checkpoints in it.

    A save to the path may have ended when all was written and only the rename was left. Its folder counts as well, and
    is the newest. So ``load(path)`` and a load of the folder around it take the same checkpoint.

    Folders with a damaged marker come first, as each may be the newest. Reading such a folder raises and names it.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    unnamed = list(filter(_is_final, _partials_of(path)))
    if has_marker(path):
        complete, damaged = _sorted([path, *unnamed])
        return [*(one for one in damaged if one == path), *(one.folder for one in complete)]
    complete, damaged = _sorted(unnamed)
    if not complete and not damaged:
        try:
            complete, damaged = _sorted(filter(_is_final, _folders_in(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return [*damaged, *(one.folder for one in complete)]


def time_after(parent: Path, now_ns: int) -> int:
    """The time of a new checkpoint: later than all others in the folder, even if a clock was set back."""
    return min(LATEST_NS, max([now_ns, *(one.marker.saved_ns + 1 for one in complete_in(parent))]))


def keep_newest(path: Path, count: int) -> None:
    """Leaves the checkpoint just saved and the newest others in its folder, ``count`` in all; on rank 0.

    Also removes incomplete folders that killed saves to other paths have left. A folder that is being written stays.
    """
    others = [one.folder for one in complete_in(path.parent) if one.folder != path]
    with contextlib.suppress(OSError):
        incomplete = [folder for folder in _folders_in(path.parent) if _is_partial(folder) and not has_marker(folder)]
        for folder in [*others[count - 1 :], *incomplete]:
            if not _is_partial(folder) or is_left(folder):
                with contextlib.suppress(OSError):
                    remove(folder)


def _is_partial(folder: Path) -> bool:
    return _PARTIAL.fullmatch(folder.name) is not None


# -- removing ---------------------------------------------------------------------------------------------------------


def _entries_of(folder: Path) -> list[os.DirEntry[str]]:
    return sorted(os.scandir(folder), key=lambda entry: entry.name)


def _is_own(entry: os.DirEntry[str]) -> bool:
    """True if a save may have written this file into a checkpoint's folder."""
    return OWN_NAME.fullmatch(entry.name) is not None and entry.is_file(follow_symlinks=False)


def _hidden(folder: Path) -> Path:
    return folder.with_name(f".zeroshard.{secrets.token_hex(8)}.removing")


def remove(folder: Path) -> None:
    """Removes a checkpoint. If somebody else has put files there, they stay, and the folder stays under its name."""
    if all(map(_is_own, _entries_of(folder))):
        folder = folder.rename(_hidden(folder))
    _empty(folder)


def _finish_removals(parent: Path) -> None:
    """Finishes removals that a crash has interrupted. Does not disturb a removal that goes on."""
    with contextlib.suppress(OSError):
        for entry in _entries_of(parent):
            if _REMOVING.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _empty(Path(entry.path))


def _empty(folder: Path) -> None:
    """Removes a checkpoint's files. The marker goes first: a folder that lacks a file must not look complete."""
    (folder / MARKER).unlink(missing_ok=True)
    for entry in _entries_of(folder):  # by name: rank files go last, and show that the other files are ours
        if _is_own(entry):
            Path(entry.path).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty
        os.rmdir(folder)
