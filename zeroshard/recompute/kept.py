"""One activation checkpoint between forward and backward: divided among model-parallel ranks, on the host, or as it is.

    forward:   tensor → this rank's part of its elements (P_a) → the device or the host (P_a+cpu)
    backward:  the host → this rank's slice of a whole tensor → all-gathered → tensor

Both ways run on the stream of the model-parallel lane, beside the computation. What comes back is bit for bit what
went, in the memory layout that it had.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..comm import parallel
from ..comm.fabric import Fabric
from ..comm.lane import Done, Pending, wait_on_host
from ..config.bounds import ON_THEIR_WAY
from ..config.options import Activations
from ..system import compat, trace
from .host import HostPool
from .part import part_of


class Stores:
    """What the checkpoints of one model have in common: where they go, and through what."""

    def __init__(self, options: Activations, fabric: Fabric, local_ranks: int) -> None:
        self.options, self.fabric = options, fabric
        self.host = HostPool(fabric.device, local_ranks) if options.offload else None
        self._traffic = {trace.DOWN: 0, trace.UP: 0}
        self._leaving: deque[_Leaving] = deque()

    def parts_of(self, tensor: Tensor) -> int:
        """Into how many parts a checkpoint is divided. A DTensor that is divided already stays as it is."""
        return self.fabric.model.world if self.options.partition and not parallel.divided(tensor) else 1

    def send(self, source: Tensor, slot: Tensor, watch: _Watch) -> None:
        """Copies to the host; the source is held until it has left."""
        target = slot[: source.nbytes].view(source.dtype)
        pending = self.fabric.model.run(lambda: target.copy_(source, non_blocking=True))
        self._leaving.append(_Leaving(pending, source, slot, watch))
        self.count(trace.DOWN, source.nbytes)
        self.let_go(ON_THEIR_WAY)

    def count(self, way: str, size: int) -> None:
        """Notes bytes that are to cross between host and device."""
        self._traffic[way] += size

    def take_traffic(self) -> dict[str, int]:
        """What crossed since this was last asked; nothing at all where checkpoints stay on the device."""
        taken, self._traffic = self._traffic, {trace.DOWN: 0, trace.UP: 0}
        return {} if self.host is None else taken

    def let_go(self, at_most: int) -> None:
        """Waits, on the device, for copies to the host, until no more than so many hold their source."""
        while len(self._leaving) > at_most:
            leaving = self._leaving.popleft()
            leaving.pending.wait()
            leaving.watch.check()

    def forget(self, slot: Tensor) -> None:
        """Lets go of what was on its way to a slot that nobody will read; on any thread, in the midst of anything."""
        for leaving in list(self._leaving):
            if leaving.slot is slot:
                wait_on_host(leaving.pending)
                with suppress(ValueError):  # has gone meanwhile
                    self._leaving.remove(leaving)


@dataclass(frozen=True, eq=False)
class _Leaving:
    """A copy to the host, and what it needs until it is done."""

    pending: Pending
    source: Tensor
    slot: Tensor
    watch: _Watch


class _Watch:
    """Whether a tensor was changed in place since."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, compat.version(tensor)

    def check(self) -> None:
        if compat.version(self._tensor) != self._version:
            raise changed_in_place(
                "the model changed an input of a checkpointed block in place, after the block's call"
            )


def changed_in_place(what: str) -> RuntimeError:
    """What is raised where a block cannot be recomputed, for its inputs are not what they were."""
    return RuntimeError(f"{what}, so the block cannot be recomputed from it; use a copy, as in x = x + block(x)")


class _Form(NamedTuple):
    """What a tensor was, beside its elements."""

    shape: torch.Size
    order: tuple[int, ...]
    """Its axes as they lie in memory, outermost first."""

    @classmethod
    def of(cls, tensor: Tensor) -> tuple[_Form, Tensor]:
        """The form, and the elements in the order of memory; a tensor that lies in no plain order is copied."""
        order = tuple(sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True))
        laid = tensor.permute(order)
        if not laid.is_contiguous():
            order, laid = tuple(range(tensor.dim())), tensor.contiguous()
        return cls(tensor.shape, order), laid.reshape(-1)

    def view(self, elements: Tensor) -> Tensor:
        """The tensor again."""
        laid = elements.view([self.shape[axis] for axis in self.order])
        return laid.permute([self.order.index(axis) for axis in range(len(self.order))])


class Kept:
    """One tensor that a checkpoint keeps."""

    def __init__(self, tensor: Tensor, stores: Stores, label: str) -> None:
        self._stores, self._label = stores, label
        self.requires_grad = tensor.requires_grad
        self._outside = tensor.detach() if isinstance(tensor, DTensor) else None
        """Of a DTensor, all but its values."""
        self._form, elements = _Form.of(parallel.local(tensor.detach()))
        self._dtype, self._numel = tensor.dtype, elements.numel()
        self._host: Tensor | None = None
        self._device: Tensor | None = None
        self._coming: tuple[Pending, Tensor] | None = None
        self._parts = stores.parts_of(tensor)
        self._rank = stores.fabric.model.rank if self._parts > 1 else 0
        self._part = part_of(self._numel, self._parts)
        self._watch: _Watch | None = None
        # In-place operations on a DTensor are counted on its outside.
        self._put_away(elements, _Watch(elements if self._outside is None else self._outside))
        if self._outside is not None:
            nothing = torch.empty((), dtype=self._dtype, device=elements.device)
            compat.point(self._outside, nothing.expand(self._form.shape))

    def _put_away(self, elements: Tensor, watch: _Watch) -> None:
        stores = self._stores
        if self._parts > 1:
            elements = elements[self._part * self._rank :][: self._part]
        if stores.host is not None:
            self._host = stores.host.take(elements.nbytes, dry=compat.is_fake(elements))
            stores.send(elements, self._host, watch)
        elif self._parts > 1:
            self._device = elements.clone()  # a slice would hold all of it
        else:
            self._device, self._watch = elements, watch

    def fetch(self) -> None:
        """Starts bringing it back."""
        if self._coming is not None:
            return
        stores = self._stores
        stores.let_go(0)
        lane, device = stores.fabric.model, stores.fabric.device
        mine = self._device
        if self._parts == 1 and mine is not None:
            self._coming = (Done(), mine)
            return
        whole = torch.empty(self._part * self._parts, dtype=self._dtype, device=device)
        slice_of_mine = whole[self._part * self._rank :][: self._part]
        numel = max(0, min(self._part, self._numel - self._part * self._rank))
        host = self._host

        def fill() -> None:
            source = mine if host is None else host[: numel * self._dtype.itemsize].view(self._dtype)
            assert source is not None
            slice_of_mine[:numel].copy_(source, non_blocking=True)

        if host is not None:
            stores.count(trace.UP, numel * self._dtype.itemsize)
        if self._parts > 1:
            self._coming = (lane.all_gather(whole, slice_of_mine, self._label, fill), whole)
        else:
            self._coming = (lane.run(fill), whole)

    def take(self) -> Tensor:
        """The tensor as it was. What was kept is kept still, for a second backward."""
        if self._watch is not None:
            self._watch.check()
        self.fetch()
        assert self._coming is not None
        pending, whole = self._coming
        self._coming = None
        pending.wait()
        tensor = self._form.view(whole[: self._numel])
        if self._outside is not None:
            tensor = parallel.like(self._outside, tensor)
        return tensor.detach().requires_grad_(self.requires_grad)

    def drop(self) -> None:
        """Gives the memory back, when no backward will come any more."""
        if self._coming is not None:  # fetched ahead of a backward that did not come: peers wait for our messages
            wait_on_host(self._coming[0])  # a finalizer may run on any thread, beside any stream
            self._coming = None
        if self._host is not None and self._stores.host is not None:
            self._stores.forget(self._host)
            self._stores.host.give_back(self._host)
        self._device = self._host = None
