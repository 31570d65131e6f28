"""Buffers that a model writes while it trains, such as batch norm's running statistics, follow rank 0, as in DDP.

With tensor parallelism they follow the first rank that has the same part of the model, because buffers may belong to
that part. DDP broadcasts buffers before every forward. Here a step broadcasts them, and only if some rank wrote to a
buffer since the last step: a model whose buffers are constants pays nothing. With ``on_nonfinite`` there is a copy of
every buffer, which is renewed twice a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..comm import parallel
from ..comm.fabric import DisagreementError, Fabric
from ..system import compat


class _BufferCopy(NamedTuple):
    """A buffer and its values at an earlier time."""

    buffer: Tensor
    """The object itself: a model may put another object in its place."""
    values: Tensor
    persistent: bool

    @property
    def fits(self) -> bool:
        """Whether values can still be copied between the two: the buffer has its shape, and memory for each element."""
        return self.values.shape == self.buffer.shape and not _repeats(self.buffer)


def make_ordinary(model: nn.Module) -> None:
    """Gives buffers that were made under ``torch.inference_mode()`` memory that can be written, with the same values.

    The objects stay. Outside that mode nobody can write to such a tensor, so rank 0's values could not be taken.
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
        self._copies: dict[tuple[nn.Module, str], _BufferCopy] = {}
        self._empty: set[tuple[nn.Module, str]] = set()
        """Buffers that were None when the copies were made."""
        self.differ = False
        """The ranks agreed that one of them wrote to a buffer."""
        self.shapes = 0
        """A hash of the buffers' sizes. Processes whose buffers have the same sizes have the same hash."""
        self.uneven = False
        """The ranks agreed that their buffers differ in size."""
        self.look()

    def look(self) -> bool:
        """Whether this rank wrote to a buffer, or replaced one, since the last look."""
        owners = compat.buffer_owners(self._model)
        unseen = any(map(_averages_unseen, owners))
        named = chain.from_iterable(compat.buffers_of(owner).values() for owner in owners)
        buffers = list(dict.fromkeys(buffer for buffer in named if buffer is not None))
        if any(buffer.is_inference() for buffer in buffers):  # made by an evaluation
            make_ordinary(self._model)
        # Weak references first: a new buffer may have the id of a buffer that does not exist any more.
        before = [(id(seen()), version) for seen, version in self._seen]
        now = [(id(buffer), compat.version(buffer)) for buffer in buffers]
        self._seen = [(weakref.ref(buffer), version) for buffer, (_, version) in zip(buffers, now, strict=True)]
        # Python hashes integers alike in every process. One bit less, so that the negative fits 64 bits too.
        self.shapes = hash(tuple((*buffer.shape, buffer.itemsize) for buffer in buffers)) >> 1
        return unseen or before != now

    def remember(self) -> None:
        """Makes a copy of every buffer, for ``recall``.

        All buffers are copied each time, because a write may leave no trace: torch's batch norm does not raise the
        version of its statistics.
        """
        self._empty = {(module, name) for module in self._model.modules() for name in _empty_names(module)}
        before, self._copies = self._copies, {}
        renewed: list[_BufferCopy] = []
        for key, buffer in self._named():
            copy = before.get(key)
            if copy is not None and copy.buffer is buffer and copy.fits:
                renewed.append(copy)
            else:
                copy = _BufferCopy(buffer, buffer.detach().clone(), compat.is_persistent(*key))
            self._copies[key] = copy
        _copy([copy.values for copy in renewed], [copy.buffer for copy in renewed])

    def recall(self) -> None:
        """Goes back to the copies: the same objects, with the same values.

        A new buffer that is not persistent stays. It is a cache, such as a table of rotations that has grown with a
        longer sequence, and other attributes of its module may tell how far the table reaches.
        """
        now, written = dict(self._named()), []
        for module, name in now.keys() - self._copies.keys():  # buffers that were made since the copies
            if not compat.is_persistent(module, name):
                continue
            if (module, name) in self._empty:
                setattr(module, name, None)
            else:
                delattr(module, name)
        for (module, name), copy in self._copies.items():
            there = now.get((module, name))
            if there is not copy.buffer:
                if there is not None and not compat.is_persistent(module, name):
                    continue
                if there is None and name not in _empty_names(module) and hasattr(module, name):
                    delattr(module, name)  # the attribute is no buffer any more
                module.register_buffer(name, copy.buffer, persistent=copy.persistent)
            if copy.fits:
                written.append(copy)
        _copy([copy.buffer for copy in written], [copy.values for copy in written])

    def follow_rank_zero(self) -> None:
        """Takes rank 0's values if the ranks agreed that one of them wrote to a buffer."""
        if self.differ:
            buffers = self._common() if self.uneven else list(self._model.buffers())
            self._fabric.broadcast_together([parallel.local(buffer.data) for buffer in buffers], divided=True)
            self.differ = False
            self.look()

    def _common(self) -> list[Tensor]:
        """The persistent buffers, after a check that they have the same sizes on all ranks.

        Other buffers are caches, which may grow on some ranks only.
        """
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
    """Whether a module is a batch norm that counts no batches: its writes to statistics leave no trace at all."""
    buffers = compat.buffers_of(module)
    return module.training and buffers.get("running_mean") is not None and buffers.get("num_batches_tracked") is None


def _repeats(buffer: Tensor) -> bool:
    """Whether elements share memory, as after ``expand()``. Such a buffer cannot be written."""
    if buffer.layout is not torch.strided:
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each source into its target, past autograd. All of one dtype and device are copied at once."""
    together: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        pair = (parallel.local(target.data), parallel.local(source.data))
        if pair[0].layout is torch.strided and not any(tensor.is_conj() or tensor.is_neg() for tensor in pair):
            together.setdefault((pair[0].dtype, pair[0].device), []).append(pair)
        else:
            pair[0].copy_(pair[1])
    for pairs in together.values():
        compat.copy_all([target for target, _ in pairs], [source for _, source in pairs])


def _empty_names(module: nn.Module) -> list[str]:
    """Names of a module's buffers that are None, which ``named_buffers()`` leaves out."""
    return [name for name, buffer in compat.buffers_of(module).items() if buffer is None]
