"""Files that appear together: written under hidden names, they take their own when nothing is missing.

The hidden names have a token, which no other writer to the same folder has, and a file that is locked as long as it
writes. So what a killed one has left is known, and goes; what another one writes stays.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from .claim import is_locked, lock
from .format import CheckpointError
from .write import NO_ROOM, sync_folder

WEIGHTS = re.compile(r"(adapter_)?(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
"""Names under which a model's or an adapter's weights are looked for."""
_LOCK = re.compile(r"\.zeroshard\.([0-9a-f]{16})\.tmp")

_writing: set[str] = set()
"""Tokens of this process, whose locks it cannot see."""


class Output:
    """A folder of files that all appear when the block ends without an error, and none of which stays otherwise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made = not folder.exists()
        self._token = secrets.token_hex(8)
        self._lock: int | None = None
        self._names: list[str] = []
        self._replaced: list[Path] = []
        self._shown: list[Path] = []
        self._done = False
        self._kept = False
        """What was there before is gone, so that what was written stays, whatever happens."""

    def __enter__(self) -> Self:
        return self

    def replace(self, files: Sequence[Path]) -> None:
        """These go when the new files appear."""
        self._replaced = list(files)

    def new(self, name: str, start: bytes = b"") -> Path:
        """A file that will have this name; where its bytes go till then. The last one is the last to appear."""
        if not self._names:
            self._open()
        self._names.append(name)
        self._hidden(name).write_bytes(start)
        return self._hidden(name)

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(self.folder)
        _writing.add(self._token)
        while self._lock is None or not self._hidden("zeroshard").exists():  # somebody cleared up before it was locked
            self._unlock()
            self._lock = lock(self._hidden("zeroshard"))

    def _unlock(self) -> None:
        descriptor, self._lock = self._lock, None
        if descriptor is not None:
            os.close(descriptor)

    def _hidden(self, name: str) -> Path:
        return self.folder / f".{name}.{self._token}.tmp"

    @property
    def files(self) -> list[Path]:
        return [self.folder / name for name in self._names]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        inside = error is not None
        if error is None:
            try:
                self.show()
            except BaseException as failed:
                error = failed
        needed = 0 if error is None or self._kept else self._remove()
        self._close(failed=error is not None)
        if isinstance(error, OSError):
            raise CheckpointError(f"{self.folder} was not written: {error}; {self._remedy(error, needed)}") from error
        if error is not None and not inside:
            raise error

    def show(self) -> None:
        """Makes all durable, and gives it its names, unless that was done."""
        if self._done or not self._names:
            return
        for name in self._names:
            with open(self._hidden(name), "rb") as opened:
                os.fsync(opened.fileno())
        for file in self._replaced:  # before: a mixture of two models must not look like one, whatever happens now
            file.unlink(missing_ok=True)
            self._kept = True
        for name in self._names:
            if not (self.folder / name).exists():
                self._shown.append(self.folder / name)
            os.replace(self._hidden(name), self.folder / name)
        sync_folder(self.folder)
        self._done = True

    def _remove(self) -> int:
        """Takes back what was written; returns how many bytes that was."""
        written = 0
        for file in [*map(self._hidden, self._names), *self._shown]:
            with contextlib.suppress(OSError):
                written += file.stat().st_size
                file.unlink()
        return written

    def _close(self, failed: bool) -> None:
        """Others may write, and take away what a failure has left here under hidden names."""
        if self._lock is not None and not any(self._hidden(name).exists() for name in self._names):
            with contextlib.suppress(OSError):
                self._hidden("zeroshard").unlink(missing_ok=True)
        self._unlock()
        _writing.discard(self._token)
        if self._made and failed:
            with contextlib.suppress(OSError):  # somebody else has put something there
                self.folder.rmdir()

    def _remedy(self, error: OSError, written: int) -> str:
        if self._kept:
            hidden = [name for name in self._names if self._hidden(name).exists()]
            if not hidden:
                return "all files are there, but may not outlive a power failure; see to that, and write them again"
            return (
                "what was there before is gone, and what was written is left: see to that and, before anything else is "
                f"written there, rename {self._hidden(hidden[0]).name} to {hidden[0]}"
                + (f", and {len(hidden) - 1} more likewise" if len(hidden) > 1 else "")
            )
        if error.errno not in NO_ROOM:
            return "what was written of it is removed; see to that, or write to another folder"
        free = shutil.disk_usage(self.folder if self.folder.exists() else self.folder.parent).free
        return (
            f"the {written / 1e9:.3f} GB that were written are removed, and {free / 1e9:.3f} GB are free there now; "
            "make room, or write to another disk"
        )


def _remove_leftovers(folder: Path) -> None:
    """What writers that were killed have left. The lock goes last: by it the others are known."""
    names = os.listdir(folder)
    for found in filter(None, map(_LOCK.fullmatch, names)):
        token = found[1]
        if token not in _writing and not is_locked(folder / found[0]):
            for name in names:
                if name[:1] == "." and name.endswith(f".{token}.tmp") and name != found[0]:
                    (folder / name).unlink(missing_ok=True)
            (folder / found[0]).unlink(missing_ok=True)
