"""``zeroshard.save``: one folder, written by all ranks, each what it has."""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..comm.fabric import Fabric
from ..optim.optimizer import ShardedOptimizer
from ..runtime import Runtime, runtime_of
from ..system import compat
from .agreement import agree
from .background import Latest, Opened, Saving, check_not_writing
from .contents import Contents, collect
from .folder import discard, partial_of, prepare
from .format import TOKEN, CheckpointError
from .snapshot import Snapshots
from .write import remedy_of

SEEN_WITHIN_SECONDS = 10.0
"""How long a network file system may take to show a rank what another has written."""

_latest: weakref.WeakKeyDictionary[Runtime, Latest] = weakref.WeakKeyDictionary()
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
) -> Saving:
    """Writes a checkpoint of everything that training goes on from. Collective: call it on all ranks.

    Args:
        path: the checkpoint's folder, which all ranks must see. A checkpoint that is there already is replaced, but
            not before the new one is complete; anything else that is there is an error, and stays.
        model: what ``shard()`` returned; its parameters, frozen ones too, and its buffers are saved.
        optimizer: likewise: masters, states, steps, settings of its groups, loss scale. None saves the model alone.
        scheduler: anything with ``state_dict()``; rank 0's is saved.
        loader: the data's position, by anything with ``state_dict()``; every rank's is saved.
        extra: numbers, strings, lists, tuples, dicts and tensors of your own, which ``load()`` returns; rank 0's.
        asynchronous: copy to host memory, and write while training goes on. What goes wrong is raised by the next
            ``save()``, or by ``wait()`` of what this returns; where host memory has no room, it blocks and says so.
        keep: of the complete checkpoints in the folder that ``path`` is in, leave this many of the newest;
            what killed saves have left there goes too.

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
    latest = finish_latest(runtime)
    snapshots = snapshots_of(model)
    with compat.label("zeroshard.save"), torch.no_grad():
        contents, target, problem = None, Path(), None
        opened: Opened | None = None
        lacking = 0
        try:
            target = Path(path).absolute()
            check_not_writing(target)
            check_optimizer(runtime, optimizer, "save")
            if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
                raise ValueError(f"keep={keep!r} must be a whole number, at least 1")
            contents = collect(runtime, optimizer, scheduler=scheduler, loader=loader, extra=extra)
            if asynchronous:
                lacking = snapshots.lacking(contents)
            if fabric.rank == 0:
                opened = _open_folder(target)
        except Exception as error:
            problem = error
        with _given_up_on_error(opened):
            everybody = agree(fabric, problem, _Ready(None if opened is None else opened.token, lacking))
            assert contents is not None
            opened = opened or Opened(everybody[0].token, None)
            # Memory is got on all ranks or on none: some would block, the others wait for them in the next step.
            lacking = max(one.lacking for one in everybody)
            got_none = snapshots.allocate(contents) if asynchronous and lacking <= 0 else None
            seen = agree(fabric, None, (_is_seen(target, opened.token), got_none))
            _check_seen(target, opened.token, [sees for sees, _ in seen])
            if asynchronous:
                asynchronous = not _say_why_not(fabric, snapshots, contents, lacking, [why for _, why in seen])
            saving = None
            try:
                if asynchronous:
                    contents = snapshots.take(contents)
                elif fabric.device.type == "cuda":
                    torch.cuda.synchronize(fabric.device)  # another thread reads what is written now
                steps = 0 if runtime.optimizer is None else runtime.optimizer.steps
                saving = Saving(target, fabric, opened, contents, steps=steps, keep=keep)
            except Exception as error:
                problem = error
            del contents
            try:
                agree(fabric, problem)
            except BaseException:
                if saving is not None:
                    saving.give_up()
                raise
        assert saving is not None
        saving.begin()
        if asynchronous:
            latest.begin(saving)
        else:
            saving.wait()
    return saving


class _Ready(NamedTuple):
    """What ranks tell each other before a save begins."""

    token: str | None
    """Of rank 0: what the new folder is called by."""
    lacking: int
    """Bytes of host memory that a snapshot would take too many."""


@contextmanager
def _given_up_on_error(opened: Opened | None) -> Iterator[None]:
    """A save that does not begin leaves no folder."""
    try:
        yield
    except BaseException:
        if opened is not None and opened.claim is not None:
            discard(opened.claim)
        raise


def _say_why_not(
    fabric: Fabric, snapshots: Snapshots, contents: Contents, lacking: int, got_none: Sequence[str | None]
) -> bool:
    """Whether a save must block, for want of memory; and says so."""
    if lacking > 0:
        size = snapshots.size(contents) / 2**30
        why = f"a snapshot takes {size:.2f} GiB of host memory a rank, {lacking / 2**30:.2f} GiB too much"
    else:
        failed = [(rank, text) for rank, text in enumerate(got_none) if text is not None]
        if not failed:
            return False
        snapshots.give_back()
        why = f"rank {failed[0][0]} got no host memory for a snapshot ({failed[0][1]})"
    _say(fabric, f"zeroshard: {why}, so this save blocks")
    return True


def finish_latest(runtime: Runtime) -> Latest:
    """Waits for the save that a model began last; raises what went wrong with it. Collective."""
    latest = _latest.setdefault(runtime, Latest())
    latest.wait(lambda text: _say(runtime.fabric, text))
    return latest


def snapshots_of(model: nn.Module) -> Snapshots:
    """The host memory that asynchronous saves of a model copy into."""
    runtime = runtime_of(model)
    return _snapshots.setdefault(runtime, Snapshots(runtime.fabric))


def check_optimizer(runtime: Runtime, optimizer: object, what: str) -> None:
    """The optimizer must be this model's."""
    if optimizer is not None and optimizer is not runtime.optimizer:
        raise ValueError(f"{what}(): this optimizer is not the model's; pass both as zeroshard.shard() returned them")


def _open_folder(path: Path) -> Opened:
    """An empty folder that is this job's; on rank 0."""
    token = secrets.token_hex(8)
    try:
        claim = prepare(path, token)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be written: {error}{remedy_of(error)}") from error
    with _given_up_on_error(opened := Opened(token, claim)):
        try:
            (claim.folder / TOKEN).write_text(token)
        except Exception as error:
            raise CheckpointError(f"{path} cannot be written: {error}{remedy_of(error)}") from error
    return opened


def _is_seen(path: Path, token: str) -> bool:
    """Whether this rank sees what rank 0 has written."""
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS
    while not (seen := _sees(path, token)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return seen


def _check_seen(path: Path, token: str, seen: Sequence[bool]) -> None:
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if blind:
        raise CheckpointError(
            f"rank {', '.join(map(str, blind))} cannot see {partial_of(path, token)} as rank 0 wrote it; all "
            "ranks must save to one folder, on a file system that every node has mounted at the same place"
        )


def _sees(path: Path, token: str) -> bool:
    try:
        return (partial_of(path, token) / TOKEN).read_text() == token
    except (OSError, ValueError):
        return False


def _say(fabric: Fabric, text: str) -> None:
    if fabric.rank == 0:
        print(text, flush=True)
