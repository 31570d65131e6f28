"""The claim on a folder: one process writes there, a save for a moment or a job until it ends, and others are told.

A file in the folder is locked. The system gives the lock back when the process ends, however it ends. So a claim that a
killed job has left is known at once, and is taken over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from .format import CLAIM, LARGEST_MARKER, CheckpointError, open_plain

LONGEST_SILENCE = 24 * 3600.0
"""Seconds without a write, after which nobody is taken to write into a folder of another machine."""
LOOK_SECONDS = 0.2
"""A process that only asks whether a folder is claimed has a lock on the file for less than this."""

_HOLDER = re.compile(r"process \d+ on (?P<host>[\w.-]+)(, since [\d :-]+)?")
_own: set[tuple[int, int]] = set()
"""The locked files of this process, by device and inode. They must not be opened a second time: when any descriptor of
a file is closed, the system gives back the process's lock on it."""


class FolderClaim:
    """A folder that this process alone writes into, until ``release``. The folder is made if it is not there.

    Where a file system has no locks, nothing prevents two jobs from writing into one folder. Saves still never mix:
    each has a folder of its own, and the job whose folder the other one removes fails.
    """

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError if another process, or this one, has claimed the folder."""
        self.made = _make(folder)
        self.folder = folder
        self._descriptor: int | None = None
        self._file = 0, 0
        try:
            while self._descriptor is None:
                self._descriptor = self._open_locked()
        except BaseException:
            self.release()
            if self.made:
                with contextlib.suppress(OSError):  # not empty: another process has claimed it
                    folder.rmdir()
            raise

    def _open_locked(self) -> int | None:
        """Returns the open, locked file. None if somebody has removed the file meanwhile."""
        file = self.folder / CLAIM
        if _identity(file) in _own:
            raise CheckpointError(refusal(self.folder, self.folder))
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        problem, latest = _lock(descriptor, fcntl.LOCK_EX), time.monotonic() + LOOK_SECONDS
        try:
            while isinstance(problem, BlockingIOError | PermissionError) and time.monotonic() < latest:
                time.sleep(LOOK_SECONDS / 10)
                problem = _lock(descriptor, fcntl.LOCK_EX)
            if isinstance(problem, BlockingIOError | PermissionError):
                raise CheckpointError(refusal(self.folder, self.folder))
            found = os.fstat(descriptor)
            if _identity(file) != (found.st_dev, found.st_ino):
                os.close(descriptor)
                return None
            if found.st_size and not _HOLDER.fullmatch(
                os.pread(descriptor, LARGEST_MARKER, 0).decode(errors="replace")
            ):
                raise CheckpointError(
                    f"{file} is no claim of a job, which would replace it; move it, or use another folder"
                )
            if problem is None:  # a name in the file says that it was locked
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {_host()}, since {now}".encode(), 0)
        except BaseException:
            if self.made and problem is None:  # else the file is another's
                file.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        self._file = found.st_dev, found.st_ino
        _own.add(self._file)
        return descriptor

    def release(self) -> None:
        """Gives the lock back."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
            _own.discard(self._file)


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Inside, this process alone writes into a folder. Leaves no claim behind, and no empty folder of its own.

    Raises:
        CheckpointError: another job writes there.
    """
    claim = FolderClaim(folder)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / CLAIM).unlink(missing_ok=True)  # before the lock is given back: it may be another's afterwards
        claim.release()
        if claim.made:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


def refusal(path: Path, folder: Path) -> str:
    """Why this process may not write to a path: the claim on a folder, who has it, and the remedy."""
    return (
        f"{path} is being written by another job ({holder(folder) or 'which has just ended'}); give every job a folder "
        "of its own, or end that one"
    )


def is_claimed(folder: Path) -> bool:
    """True if somebody writes into a folder: this process, or another one."""
    if is_own(folder):
        return True
    try:  # a shared lock needs a file that is open for reading; waits for no pipe, follows no link
        descriptor = os.open(folder / CLAIM, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return isinstance(error, PermissionError)  # the file of another user
    try:
        return isinstance(_lock(descriptor, fcntl.LOCK_SH), BlockingIOError | PermissionError)
    finally:
        os.close(descriptor)


def is_own(folder: Path) -> bool:
    """True if this process has claimed a folder."""
    return _identity(folder / CLAIM) in _own


def is_left(folder: Path) -> bool:
    """True if a process wrote into a folder and has ended. False if that is not certain."""
    if is_own(folder):
        return False
    # The process writes its name after it has the lock, so the name is looked for before the lock. The locks of another
    # machine are not seen on every file system, and some have none: there only a long silence tells.
    name = _HOLDER.fullmatch(holder(folder))
    here = name is not None and name["host"] == _host()
    return not is_claimed(folder) and (here or _seconds_silent(folder) > LONGEST_SILENCE)


def holder(folder: Path) -> str:
    """The process that claims, or claimed, a folder, in words; empty if it is not known."""
    if is_own(folder):  # its file must not be opened
        return f"process {os.getpid()}, this one"
    try:
        with open_plain(folder / CLAIM) as file:
            name = file.read(LARGEST_MARKER).decode(errors="replace")
    except (OSError, CheckpointError):
        return ""
    return name if _HOLDER.fullmatch(name) else ""


def _make(folder: Path) -> bool:
    """Makes a folder. Returns whether it was not there: of several processes, one makes it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise
        return False
    return True


def _host() -> str:
    """This machine's name, in letters that a claim may have. A name may be empty, or "(none)"."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname()) or "unknown"


def _lock(descriptor: int, kind: int) -> OSError | None:
    """Locks a file. Returns why the file cannot be locked; None if it is locked."""
    try:
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None


def _identity(file: Path) -> tuple[int, int] | None:
    """The device and inode of a file; None if it is not there."""
    try:
        found = os.lstat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _seconds_silent(folder: Path) -> float:
    """Seconds since something was written into a folder."""
    with contextlib.suppress(OSError):
        return time.time() - max(folder.stat().st_mtime, *(entry.stat().st_mtime for entry in os.scandir(folder)))
    return 0.0
