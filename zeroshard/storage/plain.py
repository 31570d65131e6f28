"""How every file of a checkpoint is opened to be read: as a plain file, or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from .format import CheckpointError


def open_plain(file: Path) -> BinaryIO:
    """Opens a file that is one: no link is followed, and nothing waits for a pipe that nobody writes to.

    Raises:
        CheckpointError: it is a link, a folder, a pipe or a device.
        OSError: it is not there, or cannot be opened.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP and file.is_symlink():
            raise CheckpointError(
                f"{file} is a link, which a checkpoint does not have; copy the file itself"
            ) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{file} is a folder, a pipe or a device, where a checkpoint has a file")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
