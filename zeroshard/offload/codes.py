"""Moments in 8 bits: each element is a code of one byte, and the 64 elements of a *tile* share a scale of one byte.

A code is a small floating-point number with 3 bits of mantissa. The scale of a tile is the exponent of its largest
element, so codes count from there downwards. ``native/codes.h`` has the layout, and rounds stochastically in an update.
Every number that a code stands for is a bf16 number too. So state dicts and checkpoints have bf16 moments, from which
the same codes follow again.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from ..config.layout import ALIGNMENT
from ..system import compat
from ..system.structures import map_leaves

TILE = ALIGNMENT
"""Elements that share a scale. Parameters and shards begin at multiples of it, so tiles are the same in every world."""
LOST = 20
"""The lower bits of an fp32 number that a code does not keep."""


def encode(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Writes fp32 values as codes, rounded to the nearest. Codes of dtype int8 have a sign, codes of uint8 have none.

    >>> codes, scales = torch.zeros(3, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    >>> encode(torch.tensor([1.0, 1e-3, 1e-30]), codes, scales)
    >>> decode(codes, scales)  # the last is less than the smallest code of this tile, and must not become 0
    tensor([1.0000e+00, 9.7656e-04, 5.2387e-10], dtype=torch.bfloat16)
    """
    most, signed = _largest(codes), codes.dtype is torch.int8
    bits = torch.where(values.isnan(), 0x7FC00000, values.float().view(torch.int32))
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude < 0x7F800000 - (1 << LOST)  # larger ones are cut off, so that they do not become inf
    magnitude = torch.where((magnitude > 0) & finite, magnitude + (1 << LOST >> 1), magnitude)
    padded = torch.nn.functional.pad(magnitude, (0, -magnitude.numel() % TILE)).view(-1, TILE)
    scales.copy_(padded.amax(1) >> 23)
    base = _base(scales, most, values.numel())
    upper = magnitude >> LOST
    least = (magnitude > 0).to(torch.int32)
    if signed:
        least *= 2 * values.float().abs() > ((base + 1) << LOST).view(torch.float32)
    code = torch.where(upper > base, upper - base, least)
    codes.view(torch.uint8).copy_(code | (bits >> 24 & 0x80) if signed else code)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The bf16 numbers that codes stand for."""
    most = _largest(codes)
    code = codes.view(torch.uint8).to(torch.int32)
    magnitude = code & most
    number = torch.where(magnitude > 0, (magnitude + _base(scales, most, codes.numel())) << LOST, 0)
    if codes.dtype is torch.int8:
        number |= (code & 0x80) << 24
    return number.view(torch.float32).to(torch.bfloat16)


def _largest(codes: Tensor) -> int:
    """The largest code without its sign."""
    return 0x7F if codes.dtype is torch.int8 else 0xFF


def _base(scales: Tensor, most: int, numel: int) -> Tensor:
    """For each element what was subtracted from the upper bits of its number."""
    bases = (scales.to(torch.int32) - (most >> 3)).clamp(min=0) << 3
    return bases.repeat_interleave(TILE)[:numel]


class CodedMoment(Tensor):
    """A moment in 8 bits, as the optimizer's state shows it: a bf16 tensor that can be read.

    Every function of torch gets the decoded numbers. The moment cannot be changed in place.
    """

    codes: Tensor
    scales: Tensor

    def __new__(cls, codes: Tensor, scales: Tensor) -> Self:
        made = compat.without_memory(cls, codes, torch.bfloat16)
        made.codes, made.scales = codes, scales
        return made

    def decoded(self) -> Tensor:
        """The numbers in new memory."""
        return decode(self.codes, self.scales)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.decoded()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CodedMoment({self.decoded()})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if compat.writes(func) and isinstance(args[0], cls):
            raise RuntimeError(
                'offload.moments="8bit": a moment in 8 bits cannot be changed in place; change the optimizer\'s '
                "state_dict() and load it"
            )
        args, kwargs = map_leaves(cls, cls.decoded, (args, kwargs or {}))
        return func(*args, **kwargs)
