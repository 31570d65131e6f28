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
from ..system.structures import map_leaves, tensors_in

TILE = ALIGNMENT
"""Elements that share a scale. Parameters and shards begin at multiples of it, so tiles are the same in every world."""
LOST = 20
"""The lower bits of an fp32 number that a code does not keep."""


PART = 1 << 20
"""Elements that are encoded or decoded at a time, so that a large moment needs little memory beside itself."""


def encode(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Writes fp32 values as codes, rounded to the nearest. Codes of dtype int8 have a sign, codes of uint8 have none.

    >>> codes, scales = torch.zeros(3, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    >>> encode(torch.tensor([1.0, 1e-3, 1e-30]), codes, scales)
    >>> decode(codes, scales)  # the last is less than the smallest code of this tile, and must not become 0
    tensor([1.0000e+00, 9.7656e-04, 4.6566e-10], dtype=torch.bfloat16)
    """
    for begin in range(0, values.numel(), PART):
        part, tiles = slice(begin, begin + PART), slice(begin // TILE, (begin + PART) // TILE)
        _encode(values[part].float(), codes[part], scales[tiles])


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The bf16 numbers that codes stand for."""
    numbers = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    for begin in range(0, codes.numel(), PART):
        part, tiles = slice(begin, begin + PART), slice(begin // TILE, (begin + PART) // TILE)
        numbers[part] = _decode(codes[part], scales[tiles])
    return numbers


def _encode(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    tiles = _tiles(values)
    bits = torch.where(tiles.isnan(), 0x7FC00000, tiles.view(torch.int32))
    magnitude = bits & 0x7FFFFFFF
    finite = magnitude < 0x7F800000 - (1 << LOST)  # larger ones are cut off, so that they do not become inf
    rounded = torch.where(finite, magnitude + (1 << LOST >> 1), magnitude)
    scales.copy_(rounded.amax(1) >> 23)
    base, upper = _base(scales, codes.dtype), rounded >> LOST
    if codes.dtype is torch.uint8:
        code = torch.maximum(upper, base) - base
    else:
        least = 2 * tiles.abs() > ((base + 1) << LOST).view(torch.float32)
        code = torch.where(upper > base, upper - base, least) | (bits >> 24 & 0x80)
    codes.view(torch.uint8).copy_(code.view(-1)[: codes.numel()])


def _decode(codes: Tensor, scales: Tensor) -> Tensor:
    code, base = _tiles(codes.view(torch.uint8)).to(torch.int32), _base(scales, codes.dtype)
    if codes.dtype is torch.uint8:
        number = (code + base) << LOST
    else:
        magnitude = code & 0x7F
        number = torch.where(magnitude > 0, (magnitude + base) << LOST, 0) | (code & 0x80) << 24
    return number.view(torch.float32).view(-1)[: codes.numel()]


def _tiles(values: Tensor) -> Tensor:
    """Values as rows of a tile each. The last row is filled with zeros."""
    missing = -values.numel() % TILE
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, TILE)


def _base(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """For each tile what was subtracted from the upper bits of its numbers, as a column."""
    octaves = (0x7F if dtype is torch.int8 else 0xFF) >> 3
    return (scales[:, None].to(torch.int32) - octaves).clamp(min=0) << 3


class CodedMoment(Tensor):
    """A moment in 8 bits, as the optimizer's state shows it: a bf16 tensor that can be read.

    Every function of torch gets the decoded numbers, in new memory. The moment cannot be changed in place.
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.decoded().__reduce_ex__(protocol)  # so that torch.save() writes an ordinary tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CodedMoment({self.decoded()})"

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _unchangeable()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if any(isinstance(tensor, cls) for tensor in tensors_in(compat.written(func, args, kwargs))):
            raise _unchangeable()
        args, kwargs = map_leaves(cls, cls.decoded, (args, kwargs))
        return func(*args, **kwargs)


def _unchangeable() -> RuntimeError:
    return RuntimeError(
        'offload.moments="8bit": a moment in 8 bits cannot be changed in place; change the optimizer\'s state_dict() '
        "and load it"
    )
