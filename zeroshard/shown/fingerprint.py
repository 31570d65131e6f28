"""A fingerprint of memory: tells whether user code wrote to parameters in a way that autograd does not count."""

from __future__ import annotations

import torch
from torch import Tensor

from ..system import compat


def fingerprint(tensor: Tensor) -> Tensor | None:
    """A number that depends on every bit of a flat tensor and on its place. It stays on the device."""
    if compat.is_fake(tensor):
        return None
    bits = tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)
    parts = bits.split(1 << 22)  # the products are wider than the tensor
    places = torch.arange(1, len(parts[0]) + 1, device=bits.device)
    sums = [(part * places[: len(part)]).sum() * (2 * number + 1) for number, part in enumerate(parts)]
    return torch.stack(sums).sum()
