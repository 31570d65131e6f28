"""Writes a rank's part while training goes on. On rank 0, completes the checkpoint when all parts are there.

``Snapshots`` copies the contents of a save into host memory. ``Saving`` writes on a thread of its own, without any
collective: rank 0 sees the other ranks' parts in the folder that all ranks share. ``Saving.wait`` tells the training
thread whether the save succeeded. ``wait`` notices a dead rank at once, and waits for a slow rank.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm.fabric import Fabric
from ..offload.pinned import HostBlock, aligned
from ..system import compat, machine
from .claim import FolderClaim
from .contents import Contents, Item
from .folder import clear, keep_newest, partial_of, publish, time_after
from .format import (
    BUFFER,
    CLAIM,
    INDEX,
    LARGEST_JSON,
    MARKER,
    CheckpointError,
    Marker,
    is_of_parameter,
    part_file,
)
from .limits import excess_of, largest_index
from .read import index_json
from .write import remedy_of, write_part, write_whole

POLL_SECONDS = 0.005
SLOWEST_POLL_SECONDS = 0.2
TURN_SECONDS = 0.5
EXIT_SECONDS = 60.0
"""How long the end of a process waits for its last save without a new byte: another rank may be dead."""
RESERVE = 1 << 28
"""Bytes of host memory that a snapshot leaves free."""


class Snapshots:
    """Host memory for one snapshot at a time. It is not given back: to pin it again would cost more than to fill it."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._block: HostBlock | None = None
        self.memory: Tensor | None = None

    def lacking(self, contents: Contents) -> int:
        """How many bytes of host memory are missing on this rank; 0 or less if there is enough."""
        present = 0 if self.memory is None else self.memory.numel()
        return snapshot_bytes(contents) - present - (machine.available_memory() - RESERVE) // self._fabric.local_ranks

    def allocate(self, contents: Contents) -> str | None:
        """Gets the memory. Returns None, or why there is no memory."""
        size = _copy_bytes(contents)
        if self.memory is None or self.memory.numel() < size:
            self.give_back()
            try:
                self._block = HostBlock(size, pinned=self._fabric.device.type == "cuda")
                self.memory = self._block.take(size, torch.uint8)
            except Exception as error:  # pinned memory has limits of its own, which no count of free bytes shows
                return f"{type(error).__name__}: {error}"
        return None

    def give_back(self) -> None:
        """Forgets the memory. It goes when nobody writes from it any more."""
        self.memory = self._block = None

    def take(self, contents: Contents) -> Contents:
        """Copies contents into the memory that ``allocate`` got. Training does not touch the copy."""
        assert self.memory is not None
        with compat.label("zeroshard.save snapshot"):
            offset, items = 0, []
            for entry, read in contents.items:
                target = self.memory[offset : offset + entry.nbytes].view(entry.dtype)
                target.copy_(read(), non_blocking=True)
                items.append(Item(entry, partial(_same, target)))
                offset += aligned(entry.nbytes)
            if self._fabric.device.type == "cuda":
                torch.cuda.synchronize(self._fabric.device)
        return Contents(items, contents.scalars, contents.values, contents.seat)


def snapshot_bytes(contents: Contents) -> int:
    """Bytes of host memory that a snapshot needs while it is taken."""
    return _copy_bytes(contents) + contents.joined_bytes


def _copy_bytes(contents: Contents) -> int:
    return sum(aligned(item.entry.nbytes) for item in contents.items)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def wait_on_all(fabric: Fabric, done: threading.Event) -> None:
    """Waits until an event has happened on every rank. Collective.

    The wait has short turns. Each turn finds out whether all ranks are still alive, however long a disk takes.
    """
    while fabric.maximum([not done.wait(TURN_SECONDS)], "the end of work on a disk")[0]:
        pass


class Saving:
    """A checkpoint that is being written, or was."""

    def __init__(
        self,
        path: Path,
        fabric: Fabric,
        token: str,
        claim: FolderClaim | None,
        contents: Contents,
        steps: int,
        keep: int | None,
    ) -> None:
        self.path = path
        self._fabric, self._token, self._claim, self._steps, self._keep = fabric, token, claim, steps, keep
        self._folder = partial_of(path, token)
        self._contents: Contents | None = contents
        self._done, self._abandoned = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._told = False

    def begin(self) -> None:
        """Begins to write. Called when all ranks are ready: an earlier writer would slow down ranks that prepare."""
        _unfinished.add(self)
        try:
            threading.Thread(target=self._run, name="zeroshard checkpoint", daemon=True).start()
        except RuntimeError as error:  # no thread can be started
            self._fail(error)
            self._end()

    @property
    def done(self) -> bool:
        """True if this rank has nothing left to do. On rank 0: if the checkpoint is complete, or failed."""
        return self._done.is_set()

    def wait(self) -> None:
        """Waits until the checkpoint is complete. Collective. Raises what went wrong on any rank."""
        if self._told:
            return
        with compat.label("zeroshard.save wait"), self._fabric.watchdog.during("wait() for a save"):
            wait_on_all(self._fabric, self._done)
            self._told = True
            _unfinished.discard(self)
            problems = self._fabric.gather_objects(None if self._error is None else _tell(self._error))
        if self._fabric.rank == 0 and any(problem is not None for problem in problems):
            clear(self._folder)  # all ranks are done; without this a full disk would stay full
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise CheckpointError(f"{self.path} was not saved: rank {rank}: {problem}") from self._error

    def finish_at_exit(self) -> None:
        """Waits without a collective, because other ranks may be gone. Says on stderr what went wrong."""
        written, since = -1, time.monotonic()
        while not self._done.wait(SLOWEST_POLL_SECONDS):
            if (now := _bytes_in(self._folder)) != written:
                written, since = now, time.monotonic()
            elif time.monotonic() - since > EXIT_SECONDS:
                self.abandon()
        if self._error is not None and not self._told:
            print(f"zeroshard: {self.path} was not saved: {_tell(self._error)}", file=sys.stderr)
            if self._fabric.rank == 0:
                clear(self._folder)

    def abandon(self) -> None:
        """Stops waiting for other ranks. The checkpoint stays incomplete if their parts are not there."""
        self._abandoned.set()

    # -- on the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            contents, self._contents = self._contents, None
            assert contents is not None
            write_part(self._folder, self._token, self._fabric.rank, contents)
            del contents
            if self._fabric.rank == 0:
                self._complete()
        except BaseException as error:
            self._fail(error)
        finally:
            self._end()

    def _end(self) -> None:
        if self._claim is not None:
            self._claim.release()
        self._done.set()

    def _fail(self, error: BaseException) -> None:
        """Remembers an error, and tells rank 0 in place of this rank's part."""
        self._error = error
        if self._fabric.rank != 0:
            file = self._folder / part_file(self._fabric.rank)
            try:
                write_whole(file, json.dumps({"failed": _tell(error)}).encode(), durable=False)
            except OSError:
                try:
                    file.touch()  # a full disk has room for an empty file
                except OSError:
                    print(f"zeroshard: {self.path} was not saved: {_tell(error)}", file=sys.stderr)

    def _complete(self) -> None:
        folder = self._folder
        parts = [self._await_part(rank) for rank in range(self._fabric.world)]
        index = index_json(self._token, parts)
        _check_loadable(index, parts)
        del parts
        write_whole(folder / INDEX, index)
        for rank in range(self._fabric.world):
            (folder / part_file(rank)).unlink()
        marker = Marker.of(index, self._steps, time_after(self.path.parent, time.time_ns()))
        write_whole(folder / MARKER, marker.to_json())
        publish(folder, self.path)
        (self.path / CLAIM).unlink(missing_ok=True)
        if self._keep is not None:
            keep_newest(self.path, self._keep)

    def _await_part(self, rank: int) -> Any:
        file, pause = self._folder / part_file(rank), POLL_SECONDS
        while not file.exists():
            if self._abandoned.wait(pause):
                raise CheckpointError(f"rank {rank} has not written its part")
            pause = min(2 * pause, SLOWEST_POLL_SECONDS)
        with open(file, "rb") as opened:
            text = opened.read(LARGEST_JSON)
        part = json.loads(text) if text else {"failed": "it could not write its part"}
        if "failed" in part:
            raise CheckpointError(f"rank {rank} failed: {part['failed']}")
        return part


def _check_loadable(index: bytes, parts: Sequence[Any]) -> None:
    """Raises CheckpointError if ``load()`` would refuse an index for its size."""
    kinds = {(entry["name"], entry["kind"]) for part in parts for entry in part["entries"]}
    tensors = len({name for name, kind in kinds if kind == BUFFER or is_of_parameter(kind)})
    if (excess := excess_of(index, largest_index(len(parts), tensors))) is not None:
        raise CheckpointError(
            f"the values of scheduler, loader or extra are too many: {excess}; put long lists into tensors, which have "
            "no such limit"
        )


_unfinished: weakref.WeakSet[Saving] = weakref.WeakSet()


def abandon_all() -> None:
    """Stops waiting for other ranks' parts: some rank has failed."""
    for saving in list(_unfinished):
        saving.abandon()


@atexit.register
def finish_all() -> None:
    """Waits for the saves of this process, without the other ranks. Removes those that did not succeed."""
    for saving in list(_unfinished):
        saving.finish_at_exit()


def _tell(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}{remedy_of(error)}"


def _bytes_in(folder: Path) -> int:
    """A number that changes when something is written into a folder."""
    try:
        return sum(entry.stat().st_size + 1 for entry in folder.iterdir())
    except OSError:  # the folder was renamed or removed
        return 0
