"""One input of a recomputed block, from forward to backward: on the device, divided among ranks, or on the host.

    forward:   tensor → this rank's part of its elements (P_a) → the device or the host (P_a+cpu)
    backward:  the device or the host → this rank's part of a whole tensor → all-gathered → tensor

Both ways run on the stream of the model-parallel lane, beside the computation. The tensor comes back with the same bits
and the same memory layout.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..comm import parallel
from ..comm.lane import Pending, wait_on_host
from ..system import compat, trace
from .part import part_of
from .store import CheckpointStore, VersionWatch


class SavedInput:
    """An input that stays on the device as it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._watch = VersionWatch(tensor.detach())

    def fetch(self) -> None:
        """Starts bringing the tensor back to the device."""

    def take(self) -> Tensor:
        """The tensor as it was. It stays saved, for a second backward."""
        self._watch.check()
        return self._watch.tensor.detach().requires_grad_()

    def drop(self) -> None:
        """Gives memory back when no further backward can come."""


def _without_gaps(tensor: Tensor) -> Tensor:
    """The tensor itself if its elements fill their memory, in whatever order of axes; else a contiguous copy."""
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    return tensor if tensor.permute(order).is_contiguous() else tensor.contiguous()


class MovedInput(SavedInput):
    """An input that is divided among model-parallel ranks, or waits on the host, or both."""

    def __init__(self, tensor: Tensor, store: CheckpointStore, label: str) -> None:
        self._store, self._label = store, label
        self._outside = tensor.detach() if isinstance(tensor, DTensor) else None
        """A DTensor without its values."""
        local = _without_gaps(parallel.local(tensor.detach()))
        self._shape, self._stride, self._numel = local.shape, local.stride(), local.numel()
        self._parts = store.parts_of(tensor)
        part = part_of(self._numel, self._parts)
        start = part * store.fabric.model.rank if self._parts > 1 else 0
        self._own = slice(start, start + part)
        """This rank's part of the whole tensor, padding included."""
        self._coming: tuple[Pending, Tensor] | None = None
        """The whole tensor while it is brought back."""
        own = local.as_strided((self._numel,), (1,))[self._own]
        if store.host is None:
            self._slot, self._stored = None, own.clone()  # a view would occupy the memory of the whole tensor
        else:
            self._slot = store.send(own, VersionWatch(tensor.detach()))
            self._stored = self._slot.memory[: own.nbytes].view(own.dtype)
        if self._outside is not None:
            nothing = torch.empty((), dtype=own.dtype, device=own.device)
            compat.point(self._outside, nothing.expand(self._shape))

    def fetch(self) -> None:
        if self._coming is not None:
            return
        store, stored = self._store, self._stored
        store.finish_copies()
        part = self._own.stop - self._own.start
        whole = torch.empty(part * self._parts, dtype=stored.dtype, device=store.fabric.device)
        own = whole[self._own]

        def fill() -> None:
            own[: stored.numel()].copy_(stored, non_blocking=True)

        if self._slot is not None:
            store.traffic[trace.UP] += stored.nbytes
        lane = store.fabric.model
        pending = lane.all_gather(whole, own, self._label, fill) if self._parts > 1 else lane.run(fill)
        self._coming = (pending, whole)

    def take(self) -> Tensor:
        self.fetch()
        assert self._coming is not None
        (pending, whole), self._coming = self._coming, None
        pending.wait()
        tensor = whole.as_strided(self._shape, self._stride)
        if self._outside is not None:
            tensor = parallel.like(self._outside, tensor)
        return tensor.detach().requires_grad_()

    def drop(self) -> None:
        if self._coming is not None:  # fetched for a backward that did not come: other ranks wait for our messages
            wait_on_host(self._coming[0])  # a finalizer runs on any thread, beside any stream
        if self._slot is not None:
            self._store.give_back(self._slot)
