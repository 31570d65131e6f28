"""``zeroshard.save``: one folder, written by all ranks. Each rank writes what it has."""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..comm.fabric import Fabric
from ..optim.optimizer import ShardedOptimizer
from ..runtime import Runtime, runtime_of
from ..system import compat
from ..system.sizes import size_text
from .background import Saving, Snapshots, snapshot_bytes, wait_on_all
from .claim import FolderClaim
from .contents import collect
from .folder import discard, partial_of, prepare
from .format import CheckpointError
from .frozen import NAME as FROZEN
from .frozen import sums_of, table_of
from .values import encode
from .write import remedy_of

SEEN_WITHIN_SECONDS = 10.0
"""How long a network file system may take to show a rank the folder that rank 0 has made."""

_latest: weakref.WeakKeyDictionary[Runtime, Saving] = weakref.WeakKeyDictionary()
"""The asynchronous save that a model began last."""
_snapshots: weakref.WeakKeyDictionary[Runtime, Snapshots] = weakref.WeakKeyDictionary()


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ShardedOptimizer | None = None,
    scheduler: Any = None,
    loader: Any = None,
    extra: object = None,
    *,
    asynchronous: bool = False,
    keep: int | None = None,
    frozen: bool = True,
) -> Saving:
    """Writes a checkpoint of everything that training goes on from. Collective: call it on all ranks.

    Args:
        path: the checkpoint's folder, which all ranks must see. A checkpoint that is there already is replaced when
            the new one is complete. Anything else that is there is an error, and stays.
        model: the model that ``shard()`` returned. Its parameters and its buffers are saved.
        optimizer: the optimizer that ``shard()`` returned. Masters, states, steps, settings of its groups and loss
            scale are saved. None saves the model alone.
        scheduler: anything with ``state_dict()``. Rank 0's is saved.
        loader: the data's position, by anything with ``state_dict()``. Every rank's is saved.
        extra: numbers, strings, lists, tuples, dicts and tensors of your own, which ``load()`` returns. Rank 0's is
            saved.
        asynchronous: copy to host memory, and write while training goes on. An error is raised by the next ``save()``,
            or by ``wait()`` of the returned object. Without room in host memory the save blocks, and says so.
        keep: leave this many of the newest complete checkpoints in the folder that ``path`` is in, and remove what
            killed saves have left there.
        frozen: False leaves frozen parameters out. Such a checkpoint loads only where they have the same values
            already, which ``load()`` checks: they come from ``weights=``, for example.

    >>> import tempfile, zeroshard
    >>> model = torch.nn.Linear(4, 2)
    >>> model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()))
    >>> folder = tempfile.mkdtemp() + "/step-1"
    >>> _ = zeroshard.save(folder, model, optimizer, extra={"epoch": 3})
    >>> zeroshard.load(folder, model, optimizer)
    {'epoch': 3}
    """
    runtime = runtime_of(model)
    fabric = runtime.fabric
    snapshots = snapshots_of(model)
    claim: FolderClaim | None = None
    with fabric.watchdog.during("save()"), compat.label("zeroshard.save"), torch.no_grad():
        finish_latest(runtime)
        try:
            with together(fabric) as ready:
                target = Path(path).absolute()
                check_optimizer(runtime, optimizer, "save")
                if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
                    raise ValueError(f"keep={keep!r} must be a whole number, at least 1")
                contents = collect(runtime, optimizer, scheduler=scheduler, loader=loader, extra=extra, frozen=frozen)
                token = secrets.token_hex(8)
                if fabric.rank == 0:
                    claim = _claim(target, token)
                sums = None if frozen else sums_of(runtime)
                ready.mine = token, snapshots.lacking(contents) if asynchronous else 0, sums
            token, lacking = ready.all[0][0], max(bytes_lacking for _, bytes_lacking, _ in ready.all)
            if len({sums is None for *_, sums in ready.all}) > 1:
                raise ValueError(f"frozen={frozen} on this rank, and not on all; give every rank the same")
            if not frozen and fabric.rank == 0:
                table = table_of(runtime, [sums for *_, sums in ready.all])
                contents.values[FROZEN] = encode(table, FROZEN, lambda _: FROZEN)  # it has no tensor
            with together(fabric) as begin:
                size = snapshot_bytes(contents)
                no_memory = snapshots.allocate(contents) if asynchronous and lacking <= 0 else None
                if asynchronous and lacking <= 0 and no_memory is None:
                    contents = snapshots.take(contents)
                elif fabric.device.type == "cuda":
                    torch.cuda.synchronize(fabric.device)  # another thread reads what is written now
                steps = 0 if runtime.optimizer is None else runtime.optimizer.steps
                saving = Saving(target, fabric, token, claim, contents, steps, keep)
                del contents
                begin.mine = _sees(partial_of(target, token)), no_memory
            _check_seen(partial_of(target, token), [sees for sees, _ in begin.all])
        except BaseException:
            if claim is not None:
                discard(claim)
            raise
        # All ranks block or none does: in the next step, the other ranks would wait for ranks that block.
        if asynchronous and (why := _why_blocking(size, lacking, [text for _, text in begin.all])):
            _say(fabric, f"zeroshard: {why}, so this save blocks")
            asynchronous = False
            snapshots.give_back()  # a rank that has memory writes from it once more
        saving.begin()
        if asynchronous:
            _latest[runtime] = saving
        else:
            saving.wait()
    return saving


class Answers:
    """What every rank told the others at the end of a block of ``together``."""

    def __init__(self) -> None:
        self.mine: Any = None
        self.all: list[Any] = []


@contextmanager
def together(fabric: Fabric) -> Iterator[Answers]:
    """Either all ranks come to the end of a block, or all raise: otherwise some ranks would wait forever. Collective.

    A rank raises its own error. The other ranks raise CheckpointError with the text of that error.
    """
    answers, problem = Answers(), None
    try:
        yield answers
    except Exception as error:
        problem = error
    text = None if problem is None else f"{type(problem).__name__}: {problem}"
    everybody = fabric.gather_objects((text, answers.mine))
    if problem is not None:
        raise problem
    for rank, (text, _) in enumerate(everybody):
        if text is not None:
            raise CheckpointError(f"rank {rank} failed: {text}")
    answers.all = [mine for _, mine in everybody]


def on_rank_zero(fabric: Fabric, work: Callable[[], object]) -> None:
    """Runs work on rank 0 that may take longer than ranks wait for each other. Raises on all ranks if it fails."""
    while_all_wait(fabric, work if fabric.rank == 0 else None)


def while_all_wait(fabric: Fabric, work: Callable[[], object] | None) -> None:
    """Runs the work that some ranks have, however long it takes. Raises on all ranks if it fails. Collective."""
    done, problems = threading.Event(), []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            problems.append(error)
        finally:
            done.set()

    if work is not None:
        threading.Thread(target=run, args=(work,), name=f"zeroshard rank {fabric.rank}", daemon=True).start()
    else:
        done.set()
    wait_on_all(fabric, done)
    with together(fabric):
        for problem in problems:
            raise problem


def _why_blocking(size: int, lacking: int, no_memory: Sequence[str | None]) -> str | None:
    """Why a rank has not enough memory for a snapshot; None if every rank has."""
    if lacking > 0:
        return f"a snapshot takes {size_text(size)} of host memory a rank, {size_text(lacking)} too much"
    for rank, text in enumerate(no_memory):
        if text is not None:
            return f"rank {rank} got no host memory for a snapshot ({text})"
    return None


def finish_latest(runtime: Runtime) -> None:
    """Waits for the save that a model began last; raises what went wrong with it. Collective."""
    saving = _latest.pop(runtime, None)
    if saving is not None:
        if not saving.done:
            _say(runtime.fabric, f"zeroshard: {saving.path} is still being written, and is waited for")
        saving.wait()


def snapshots_of(model: nn.Module) -> Snapshots:
    """The host memory that asynchronous saves of a model copy into."""
    runtime = runtime_of(model)
    return _snapshots.setdefault(runtime, Snapshots(runtime.fabric))


def check_optimizer(runtime: Runtime, optimizer: object, what: str) -> None:
    """Raises if the optimizer is not this model's."""
    if optimizer is not None and optimizer is not runtime.optimizer:
        raise ValueError(f"{what}(): this optimizer is not the model's; pass both as zeroshard.shard() returned them")


def _claim(path: Path, token: str) -> FolderClaim:
    try:
        return prepare(path, token)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be written: {error}{remedy_of(error)}") from error


def _sees(folder: Path) -> bool:
    """True if this rank sees the folder that rank 0 has made. Its name has a token, so it can be no other folder."""
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS
    while not (seen := folder.is_dir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return seen


def _check_seen(folder: Path, seen: Sequence[bool]) -> None:
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if blind:
        raise CheckpointError(
            f"rank {', '.join(map(str, blind))} cannot see {folder}, which rank 0 has made; all "
            "ranks must save to one folder, on a file system that every node has mounted at the same place"
        )


def _say(fabric: Fabric, text: str) -> None:
    if fabric.rank == 0:
        print(text, flush=True)
