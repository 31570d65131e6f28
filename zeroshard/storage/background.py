"""Writes a rank's part beside training, and on rank 0 completes the checkpoint when all parts are there.

A thread of its own does it, and no collective: ranks see each other's parts in the folder that they share. The
training thread is told by ``Saving.wait``, where ranks agree on how it went; one that died is noticed there at once,
one that is slow is waited for.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..comm.fabric import Fabric
from ..system import compat
from .claim import Claim, bytes_in
from .contents import Contents
from .folder import clear, keep_newest, partial_of, publish, time_after
from .format import CLAIM, INDEX, LARGEST_JSON, MARKER, TOKEN, CheckpointError, Part, data_file, failure_file, part_file
from .index import Index, index_json
from .marker import Marker, read_marker
from .write import remedy_of, write_json, write_part

POLL_SECONDS = 0.005
SLOWEST_POLL_SECONDS = 0.2
EXIT_SECONDS = 60.0
"""How long a process that ends waits for its last save while nothing is written: another rank may be dead."""


class Opened(NamedTuple):
    """The folder that a save writes to."""

    token: str
    """A name that no other save has."""
    claim: Claim | None
    """On rank 0."""


class Saving:
    """A checkpoint that is being written, or was."""

    def __init__(
        self,
        path: Path,
        fabric: Fabric,
        opened: Opened,
        contents: Contents,
        *,
        steps: int,
        keep: int | None,
    ) -> None:
        self.path = path
        self._fabric, self._token, self._steps, self._keep = fabric, opened.token, steps, keep
        self._claim = opened.claim
        self._contents: Contents | None = contents
        self._done = threading.Event()
        self._abandoned = threading.Event()
        self._error: BaseException | None = None
        self._told = False
        self._agreed, self._given_up = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="zeroshard checkpoint", daemon=True)
        self._thread.start()
        _unfinished.add(self)

    def begin(self) -> None:
        """All ranks are ready. Not before: a writer would take their time from those that still agree."""
        self._agreed.set()

    @property
    def done(self) -> bool:
        """Whether this rank has nothing left to do; on rank 0, whether the checkpoint is complete, or failed."""
        return self._done.is_set()

    def wait(self) -> None:
        """Until the checkpoint is complete. Collective: call it on all ranks. Raises what went wrong on any."""
        if self._told:
            return
        with compat.label("zeroshard.save wait"):
            # In short turns: every one finds out whether all ranks are still alive, however long the disk takes.
            while self._fabric.maximum([not self._done.wait(0.5)])[0]:
                pass
        self._told = True
        _unfinished.discard(self)
        problems = self._fabric.gather_objects(None if self._error is None else _tell(self._error))
        if self._fabric.rank == 0 and any(problem is not None for problem in problems):
            clear(partial_of(self.path, self._token))  # all ranks are done: a full disk would stay full
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise CheckpointError(f"{self.path} was not saved: rank {rank}: {problem}") from self._error

    def finish_at_exit(self) -> None:
        """Waits without the other ranks, and says on stderr what went wrong."""
        if not self._agreed.is_set():  # interrupted before all were ready
            self.give_up()
        written, since = -1, time.monotonic()
        while not self._done.wait(SLOWEST_POLL_SECONDS):
            if (now := bytes_in(partial_of(self.path, self._token))) != written:
                written, since = now, time.monotonic()
            elif time.monotonic() - since > EXIT_SECONDS:
                self.abandon()
        if self._error is not None and not self._told:
            print(f"zeroshard: {self.path} was not saved: {_tell(self._error)}", file=sys.stderr)
            if self._fabric.rank == 0:
                clear(partial_of(self.path, self._token))

    def abandon(self) -> None:
        """Waits for other ranks no longer; the checkpoint stays incomplete if their parts are not there."""
        self._abandoned.set()

    def give_up(self) -> None:
        """Ends it where another rank could not begin, which all have been told."""
        self._given_up = True
        self._agreed.set()
        self._done.wait()
        self._told = True
        _unfinished.discard(self)

    # -- on the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        rank, folder = self._fabric.rank, partial_of(self.path, self._token)
        self._agreed.wait()
        try:
            if self._given_up:
                raise CheckpointError("another rank could not begin")
            contents, self._contents = self._contents, None
            assert contents is not None
            write_part(folder, self._token, rank, contents.held, contents.scalars, contents.values)
            del contents
            if rank == 0:
                self._complete(folder)
        except BaseException as error:
            self._error = error
            if rank != 0 and not self._given_up:  # then rank 0 knows, and may be removing the folder
                self._tell_rank_zero(folder, error)
        finally:
            if self._claim is not None:
                self._claim.release()
            self._done.set()

    def _tell_rank_zero(self, folder: Path, error: BaseException) -> None:
        try:  # whole or not at all: rank 0 may look at any moment
            temporary = folder / f".{failure_file(self._fabric.rank)}.tmp"
            temporary.write_text(_tell(error))
            temporary.replace(folder / failure_file(self._fabric.rank))
        except OSError:  # a full disk has no room for that either: an empty file will do
            try:
                (folder / failure_file(self._fabric.rank)).touch()
            except OSError:
                print(f"zeroshard: {self.path} was not saved: {_tell(error)}", file=sys.stderr)

    def _complete(self, folder: Path) -> None:
        parts = [self._await_part(folder, rank) for rank in range(self._fabric.world)]
        index = index_json(self._token, parts, {"world": self._fabric.world, "steps": self._steps})
        Index(folder, self._token, [Part.from_json(part) for part in parts]).check()
        write_json(folder / INDEX, index)
        self._check_untouched(folder, parts)
        marker = Marker.of(index, self._steps, time_after(self.path.parent, time.time_ns()))
        write_json(folder / MARKER, marker.to_json())
        if read_marker(folder) != marker:  # before an older one makes way for it
            raise CheckpointError(f"{folder / MARKER} does not read back as it was written")
        (folder / TOKEN).unlink(missing_ok=True)
        publish(folder, self.path)
        (self.path / CLAIM).unlink(missing_ok=True)
        if self._keep is not None:
            keep_newest(self.path, self._keep)

    def _check_untouched(self, folder: Path, parts: Sequence[dict[str, Any]]) -> None:
        """Another job that saves to the same path clears the folder: then this must not be called complete."""
        try:
            same = (folder / TOKEN).read_text() == self._token and all(
                (folder / data_file(rank)).stat().st_size == part["size"] for rank, part in enumerate(parts)
            )
        except OSError:
            same = False
        if not same:
            raise CheckpointError(f"{folder} was changed while it was written; does another job save to {self.path}?")

    def _await_part(self, folder: Path, rank: int) -> dict[str, Any]:
        pause = POLL_SECONDS
        while not (folder / part_file(rank)).exists():
            if (folder / failure_file(rank)).exists():
                why = (folder / failure_file(rank)).read_text() or "it could not write its part"
                raise CheckpointError(f"rank {rank} failed: {why}")
            if self._abandoned.wait(pause):
                raise CheckpointError(f"rank {rank} has not written its part")
            pause = min(2 * pause, SLOWEST_POLL_SECONDS)
        with open(folder / part_file(rank), "rb") as file:
            part: dict[str, Any] = json.loads(file.read(LARGEST_JSON))
        if part["checkpoint"] != self._token:
            raise CheckpointError(f"{folder / part_file(rank)} belongs to another checkpoint")
        return part


_unfinished: weakref.WeakSet[Saving] = weakref.WeakSet()


def check_not_writing(path: Path) -> None:
    """Raises if a save of this process to the same path, of another model, goes on."""
    for saving in list(_unfinished):
        if not saving.done and os.path.realpath(saving.path) == os.path.realpath(path):
            raise CheckpointError(f"{path} is still being written by another save; wait() for that one first")


def abandon_all() -> None:
    """Stops waiting for other ranks' parts: some rank has failed."""
    for saving in list(_unfinished):
        saving.abandon()


@atexit.register
def _finish_all() -> None:
    for saving in list(_unfinished):
        saving.finish_at_exit()


def _tell(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}{remedy_of(error)}"


class Latest:
    """The save that a model began last. The next one waits for it: a slow disk holds up training, not memory."""

    def __init__(self) -> None:
        self._saving: Saving | None = None

    def wait(self, say: Callable[[str], None]) -> None:
        """Back-pressure. Collective."""
        if self._saving is not None:
            if not self._saving.done:
                say(f"zeroshard: {self._saving.path} is still being written, and is waited for")
            saving, self._saving = self._saving, None
            saving.wait()

    def begin(self, saving: Saving) -> None:
        self._saving = saving
