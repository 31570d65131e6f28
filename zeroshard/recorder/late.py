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
"""Returns a number once it is there, and None before."""


class LateNumbers:
    """Numbers of one device that are on their way to the host."""

    def __init__(self, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._slots = list(torch.zeros(SLOTS, dtype=torch.float64, device="cpu", pin_memory=True)) if pinned else []

    def take(self, value: Any, name: str) -> Late | None:
        """Begins to read a number: of Python, or a tensor with one element. None if too many are under way."""
        if isinstance(value, Tensor):
            value = local(value.detach())
            if value.numel() != 1:
                raise ValueError(f"{name} must be one number, is a tensor of shape {tuple(value.shape)}")
            if value.device.type == "cuda":
                return _Coming(value, self._slots) if self._slots else None
        return _known(float(value))


class _Coming:
    """A number whose copy is under way. Its slot is free again when nobody asks for the number any more."""

    def __init__(self, value: Tensor, slots: list[Tensor]) -> None:
        self._slots, self._slot, self._come = slots, slots.pop(), torch.cuda.Event()
        self._slot.copy_(value.reshape(()), non_blocking=True)
        self._come.record(torch.cuda.current_stream(value.device))

    def __call__(self) -> float | None:
        return float(self._slot) if self._come.query() else None

    def __del__(self) -> None:
        self._slots.append(self._slot)


def _known(number: float) -> Late:
    return lambda: number
