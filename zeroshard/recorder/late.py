"""Reads numbers of the device without waiting for it: a copy is started now, and read when it has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..comm.parallel import local

SLOTS = 64
"""Copies that may be under way. The host is rarely more than a few steps ahead of the device."""

Late = Callable[[], float | None]
"""Returns a number once it is there, and None before. A number that will never come is NaN."""


class LateNumbers:
    """Numbers of one device that are on their way to the host."""

    def __init__(self, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._slots = torch.zeros(SLOTS, dtype=torch.float64, device="cpu", pin_memory=True).unbind() if pinned else ()
        self._free = list(range(len(self._slots)))

    def take(self, value: Any, name: str) -> Late:
        """Begins to read a number: of Python, or a tensor with one element."""
        if not isinstance(value, Tensor):
            number = float(value)
            return lambda: number
        value = local(value.detach())
        if value.numel() != 1:
            raise ValueError(f"{name} must be one number, is a tensor of shape {tuple(value.shape)}")
        if value.device.type != "cuda":
            number = float(value)
            return lambda: number
        if not self._free:
            return lambda: float("nan")
        slot = self._free.pop()
        self._slots[slot].copy_(value.reshape(()), non_blocking=True)
        come = torch.cuda.Event()
        come.record()
        return lambda: self._read(slot, come)

    def _read(self, slot: int, come: torch.cuda.Event) -> float | None:
        """Reads a slot once, and frees it."""
        if not come.query():
            return None
        self._free.append(slot)
        return float(self._slots[slot])
