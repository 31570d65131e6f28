"""Buffers that a model writes while it trains, such as batch norm's running statistics, follow rank 0, as in DDP.

(With tensor parallelism: the first rank that has the same part of the model, whose buffers may be of that part.)
DDP broadcasts them before every forward. Here a step does, and only if some rank wrote to one since the last: a model
whose buffers are constants pays nothing. With ``on_nonfinite`` a copy of each is kept, and renewed twice a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..comm import parallel
from ..comm.fabric import DisagreementError, Fabric
from ..system import compat


class _Kept(NamedTuple):
    """A buffer as it was."""

    buffer: Tensor
    """The object itself: a model may put another in its place."""
    values: Tensor
    persistent: bool

    @property
    def whole(self) -> bool:
        """Whether its values can be copied to and fro: neither its shape nor its memory is another by now."""
        return self.values.shape == self.buffer.shape and not _repeats(self.buffer)


def make_ordinary(model: nn.Module) -> None:
    """Gives buffers that were made under ``torch.inference_mode()`` memory that can be written, with the same values.

    The objects stay. Nobody outside that mode can write to such a tensor, so not even rank 0's values could be taken.
    """
    names: dict[int, str] = {}
    for name, buffer in model.named_buffers():
        if buffer.is_inference():
            other = names.setdefault(compat.storage_key(buffer), name)
            if other != name:
                raise ValueError(
                    f"buffers {other!r} and {name!r} were made under torch.inference_mode() and share their memory, "
                    "which copies of them would not; build the model outside that mode"
                )
            try:
                torch.utils.swap_tensors(buffer, buffer.detach().clone())
            except RuntimeError as error:
                raise ValueError(
                    f"buffer {name!r} was made under torch.inference_mode(), where nothing can be written to it, and "
                    f"cannot be made an ordinary one ({str(error).splitlines()[0]}); build the model outside that mode"
                ) from None


class Buffers:
    """The buffers of a model, and whether they were written."""

    def __init__(self, model: nn.Module, fabric: Fabric) -> None:
        self._model, self._fabric = model, fabric
        self._seen: list[tuple[weakref.ref[Tensor], int]] = []
        self._kept: dict[tuple[nn.Module, str], _Kept] = {}
        self._empty: set[tuple[nn.Module, str]] = set()
        """Those that were None."""
        self.differ = False
        """Some rank wrote to a buffer, as the ranks agreed."""
        self.shapes = 0
        """A hash of the buffers' sizes, the same in all processes that have the same."""
        self.uneven = False
        """Ranks have buffers of different sizes, as they agreed."""
        self.look()

    def look(self) -> bool:
        """Whether this rank wrote to a buffer, or replaced one, since the last look."""
        unseen = any(_averages_unseen(module) for module in self._model.modules())
        before, buffers = self._seen, list(self._model.buffers())
        if any(buffer.is_inference() for buffer in buffers):  # made by an evaluation
            make_ordinary(self._model)
        self._seen = [(weakref.ref(buffer), compat.version(buffer)) for buffer in buffers]
        # Python hashes integers alike in every process. One bit less, so that the negative fits 64 bits too.
        self.shapes = hash(tuple((*buffer.shape, buffer.itemsize) for buffer in buffers)) >> 1
        # not by id(), which a new buffer may have from the one it replaced
        then = [(buffer(), version) for buffer, version in before]
        return (
            unseen
            or len(then) != len(buffers)
            or any(
                old is not buffer or version != compat.version(buffer)
                for (old, version), buffer in zip(then, buffers, strict=True)
            )
        )

    def remember(self) -> None:
        """Keeps a copy of every buffer, to go back to.

        Of all of them each time: torch's batch norm, for one, leaves no trace of what it writes to its statistics.
        """
        self._empty = {(module, name) for module in self._model.modules() for name in compat.empty_buffers(module)}
        before, self._kept = self._kept, {}
        again: list[_Kept] = []
        for key, buffer in self._named():
            kept = before.get(key)
            if kept is not None and kept.buffer is buffer and kept.whole:
                again.append(kept)
            else:
                kept = _Kept(buffer, buffer.detach().clone(), compat.is_persistent(*key))
            self._kept[key] = kept
        _copy([kept.values for kept in again], [kept.buffer for kept in again])

    def recall(self) -> None:
        """Goes back to what was remembered: the same objects, with the same values.

        Not where another buffer that is not persistent has come: that is a cache, such as a table of rotations that a
        longer sequence has made grow, and its module may know by other attributes how far it reaches.
        """
        now, written = dict(self._named()), []
        for module, name in now.keys() - self._kept.keys():  # made since
            if not compat.is_persistent(module, name):
                continue
            if (module, name) in self._empty:
                setattr(module, name, None)
            else:
                delattr(module, name)
        for (module, name), kept in self._kept.items():
            there = now.get((module, name))
            if there is not kept.buffer:
                if there is not None and not compat.is_persistent(module, name):
                    continue
                if there is None and name not in compat.empty_buffers(module) and hasattr(module, name):
                    delattr(module, name)  # no buffer any more
                module.register_buffer(name, kept.buffer, persistent=kept.persistent)
            if kept.whole:
                written.append(kept)
        _copy([kept.buffer for kept in written], [kept.values for kept in written])

    def follow_rank_zero(self) -> None:
        """Takes rank 0's values where the ranks agreed that they differ."""
        if self.differ:
            buffers = self._common() if self.uneven else list(self._model.buffers())
            self._fabric.broadcast_together([parallel.local(buffer.data) for buffer in buffers], divided=True)
            self.differ = False
            self.look()

    def _common(self) -> list[Tensor]:
        """The persistent buffers. The others are caches, which may grow on some ranks alone."""
        buffers = {name: buffer for name, buffer in self._model.named_buffers() if not self._is_cache(name)}
        mine = {name: (tuple(buffer.shape), str(buffer.dtype)) for name, buffer in buffers.items()}
        everybody = self._fabric.gather_objects(mine)
        for name in sorted({name for theirs in everybody for name in theirs}):
            sizes = [theirs.get(name, "none") for theirs in everybody]
            if len(set(sizes)) > 1:
                told = ", ".join(f"rank {rank}: {size}" for rank, size in enumerate(sizes))
                raise DisagreementError(f"buffer {name!r} differs in size, so rank 0's values cannot be taken: {told}")
        return [buffers[name] for name in sorted(buffers)]

    def _is_cache(self, name: str) -> bool:
        owner, _, own = name.rpartition(".")
        return not compat.is_persistent(self._model.get_submodule(owner), own)

    def _named(self) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                yield (module, name), buffer


def _averages_unseen(module: nn.Module) -> bool:
    """Whether a module is a batch norm that counts no batches: torch does not count what it writes to statistics."""
    buffers = compat.buffers_of(module)
    return module.training and buffers.get("running_mean") is not None and buffers.get("num_batches_tracked") is None


def _repeats(buffer: Tensor) -> bool:
    """Whether elements share memory, as ``expand()`` makes them: then what they are of was written, not the buffer."""
    if buffer.layout is not torch.strided:
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """All of each kind at once, past autograd."""
    kinds: dict[tuple[bool, torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        to, of = parallel.local(target.data), parallel.local(source.data)
        plain = to.layout is torch.strided and not any(one.is_conj() or one.is_neg() for one in (to, of))
        into, out_of = kinds.setdefault((plain, to.dtype, to.device), ([], []))
        into.append(to)
        out_of.append(of)
    for (plain, *_), (into, out_of) in kinds.items():
        if plain:
            compat.copy_all(into, out_of)
        else:
            for to, of in zip(into, out_of, strict=True):
                to.copy_(of)
