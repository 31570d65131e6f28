"""A few buffers that many flats take turns with."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .worker import POLL_SECONDS


class Staging:
    """A buffer of the ring while somebody has it."""

    def __init__(self, ring: Ring, block: Tensor, tensor: Tensor, free_after: torch.cuda.Event | None) -> None:
        self.tensor = tensor
        self.free_after = free_after
        """When the copy that last read it is over."""
        self.arrival: torch.cuda.Event | None = None
        self._ring, self._block = ring, block

    def wait(self) -> None:
        """Waits until what was copied into it is there."""
        if self.arrival is not None:
            self.arrival.synchronize()

    def release(self, free_after: torch.cuda.Event | None) -> None:
        """Gives it back, to be written when an event has passed."""
        self._ring.give_back(self._block, free_after)


class Ring:
    """Hands buffers out, and waits where all are taken; ``check`` raises if whoever has them has failed."""

    def __init__(self, blocks: Sequence[Tensor], check: Callable[[], None]) -> None:
        self._check = check
        self._free: queue.SimpleQueue[tuple[Tensor, torch.cuda.Event | None]] = queue.SimpleQueue()
        self._kept: dict[object, Staging] = {}
        for block in blocks:
            self._free.put((block, None))

    def acquire(self, dtype: torch.dtype, numel: int) -> Staging:
        """The buffer that is free the longest, as so many elements."""
        while True:
            try:
                block, event = self._free.get(timeout=POLL_SECONDS)
                break
            except queue.Empty:
                self._check()  # nobody will give one back if the update has failed
        return Staging(self, block, block[: numel * dtype.itemsize].view(dtype), event)

    def give_back(self, block: Tensor, event: torch.cuda.Event | None) -> None:
        """By ``Staging.release``."""
        self._free.put((block, event))

    def put(self, owner: object, staging: Staging) -> None:
        """Keeps a buffer that was filled ahead of need."""
        self._kept[owner] = staging

    def take(self, owner: object) -> Staging | None:
        """The buffer that was filled for an owner, if any."""
        return self._kept.pop(owner, None)
