"""One job at a time writes to a path, and one that died holds up nobody.

A save keeps a file in its folder locked as long as it writes. The system gives the lock back when the process ends,
however it ends, so what a killed job leaves is known as such at once. A lock may outlive another machine, on a file
system that a third one serves: so such a one counts only while the folder grows, and is waited for no longer than
``STILL_SECONDS``. One of this machine always counts: a disk may be slow to flush for longer than that.

Where a file system has no locks, two jobs that save to one path are not kept apart. They still never mix: each has a
folder of its own, and the one whose folder the other has cleared fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from .format import CLAIM, CheckpointError
from .plain import open_plain

STILL_SECONDS = 10.0
"""Below the stall_timeout that the other ranks wait for rank 0."""
FORGOTTEN_SECONDS = 24 * 3600.0
"""For so long nothing is written into a folder whose writer nobody can ask for, before it is held to be dead."""
POLL_SECONDS = 0.05
LARGEST = 4096

_claimed: set[str] = set()
"""Names of folders, each with a token, that this process writes to; whose locks it cannot see."""
_probing = threading.Lock()
"""Against looking at a claim that another thread is just making: that would give its lock back."""


class Claim:
    """This process writes to a folder, until ``release``.

    The lock is the process's, and goes when any descriptor of the file is closed: nothing else here may open it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with _probing:
            self._descriptor: int | None = lock(folder / CLAIM)
            _claimed.add(folder.name)
        try:
            machine = _machine() if _try_lock(self._descriptor) else ""  # only where the lock speaks for the process
            os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n{machine}".encode())
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Lets others write."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                (self.folder / CLAIM).unlink(missing_ok=True)
            with _probing:
                os.close(descriptor)
                _claimed.discard(self.folder.name)

    def check_alone(self, path: Path, others: Iterable[Path]) -> None:
        """Of several that write at once, the one that began first goes on.

        Raises:
            CheckpointError: another one did, and writes.
        """
        mine = _began(self.folder)
        for folder in others:
            if _began(folder) < mine and _writes(folder):
                raise CheckpointError(
                    f"{path} is being written by another job ({_name(folder)}); give every job a folder of its own, or "
                    "end that one"
                )

    def supersedes(self, folder: Path) -> bool:
        """Whether what is in another folder is left over: nobody has claimed it, or did so before, and is silent."""
        if folder == self.folder or not is_claimed(folder):
            return folder != self.folder
        return _began(folder) < _began(self.folder) and not _is_of_this_machine(folder)


def lock(file: Path) -> int:
    """Makes a file and locks it, where the file system can; until the descriptor is closed or the process ends."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    _try_lock(descriptor)
    return descriptor


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a file system without locks
        return False
    return True


def is_claimed(folder: Path) -> bool:
    """Whether another process has this folder locked."""
    return is_locked(folder / CLAIM)


def is_locked(file: Path) -> bool:
    """Whether another process has this file locked; so it is held to be where another user's may not be opened."""
    return _lock_of(file) is _Lock.HELD


class _Lock(Enum):
    HELD = "by another process"
    FREE = "by nobody"
    UNKNOWN = "there is no file, or there are no locks"


def _lock_of(file: Path) -> _Lock:
    try:
        # Reading suffices to ask for a shared lock; a pipe or a link is nobody's claim, and not waited for.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        return _Lock.HELD
    except OSError:
        return _Lock.UNKNOWN
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return _Lock.HELD
    except OSError:  # no locks here
        return _Lock.UNKNOWN
    finally:
        os.close(descriptor)
    return _Lock.FREE


def is_forgotten(folder: Path, just_written: Path) -> bool:
    """Whether nobody writes into a folder any more, whatever path its save was to; in doubt, somebody does.

    A claim of this machine that is not locked is a dead process's. Of another machine, whose locks may not be seen
    here, and where there is no claim, only time tells: by the clock of the file system, which has just written a file.
    """
    with _probing:
        if folder.name in _claimed:
            return False
        if _is_of_this_machine(folder):  # which is written after it was locked, and so is asked for before
            return _lock_of(folder / CLAIM) is _Lock.FREE
    changed = max(file.stat(follow_symlinks=False).st_mtime for file in (folder, *folder.iterdir()))
    return just_written.stat().st_mtime - changed > FORGOTTEN_SECONDS and not is_claimed(folder)


def bytes_in(folder: Path) -> int:
    """What was written into a folder: another number whenever something was."""
    try:
        return sum(entry.stat().st_size + 1 for entry in folder.iterdir())
    except OSError:  # it was renamed, or removed
        return 0


def _writes(folder: Path) -> bool:
    """Whether somebody has it locked and writes; waits while that is not clear."""
    before, deadline = bytes_in(folder), time.monotonic() + STILL_SECONDS
    while is_claimed(folder):
        if _is_of_this_machine(folder) or bytes_in(folder) != before:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return False


def _began(folder: Path) -> tuple[int, str]:
    try:
        return (folder / CLAIM).stat().st_mtime_ns, folder.name
    except OSError:
        return 0, folder.name


def _name(folder: Path) -> str:
    return _read(folder).partition("\n")[0] or "which has just ended"


def _is_of_this_machine(folder: Path) -> bool:
    return _read(folder).partition("\n")[2] == _machine()


def _read(folder: Path) -> str:
    try:
        with open_plain(folder / CLAIM) as file:
            return file.read(LARGEST).decode(errors="replace")
    except (OSError, CheckpointError):
        return ""


def _machine() -> str:
    """Another for every machine, and after it was started anew; the same for all containers on it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
