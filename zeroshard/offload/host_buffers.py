"""The buffers of one flat in host memory, and what each is for.

- **slot**: the gradient, in the parameters' dtype. The update writes the new parameters over it. There is no slot with
  ``update_in_backward``: each gradient is then copied to a buffer of a small ring and used at once.
- **master**: fp32. A split master is two buffers: **high**, the bf16 parameter itself, and **low**, the 16 bits that
  the parameter lacks.
- **moments**: the optimizer's states, with torch's names. Moments in 8 bits have **scales** too (``codes.py``).
- **fresh**: the new parameters of a delayed update, while the slot takes the next gradient.
- **resting**: the parameters, if they live on the host.
- **total**: the sum of several micro-batches in fp32. It is made when a second micro-batch comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..config.layout import Piece
from ..config.offload import Offload
from ..config.optimizers import NOT_NEGATIVE
from .codes import TILE, CodedMoment, encode
from .pinned import HostBlock, aligned

SLICE = 16 << 20
"""Elements that are rounded or divided into halves at a time. Bounds the memory of temporaries."""
SCALES = ".scales"
"""Ends the name of the buffer with a moment's scales."""


class Buffer(NamedTuple):
    """The plan of one buffer."""

    name: str
    dtype: torch.dtype
    pinned: bool
    elements: int = 1
    """Elements of the flat for each element of the buffer."""

    def numel(self, flat: int) -> int:
        """The elements of the buffer, by those of the flat's range."""
        return -(-flat // self.elements)


@dataclass(frozen=True)
class HostBytes:
    """The host memory that a rank's states take."""

    pinned: int = 0
    pageable: int = 0

    @property
    def total(self) -> int:
        return self.pinned + self.pageable

    def __add__(self, other: HostBytes) -> HostBytes:
        return HostBytes(self.pinned + other.pinned, self.pageable + other.pageable)

    def __mul__(self, count: int) -> HostBytes:
        return HostBytes(count * self.pinned, count * self.pageable)


def wanted(options: Offload, dtype: torch.dtype, moments: Sequence[str] | None) -> list[Buffer]:
    """The buffers that a flat needs, by the dtype of its parameters. ``moments`` is None for a frozen flat."""
    if moments is None:
        return [Buffer("resting", dtype, pinned=True)] if options.parameters == "cpu" else []
    half, delayed = dtype is not torch.float32, options.delayed_update_after is not None
    resting = options.parameters == "cpu"
    found: list[Buffer] = []
    if not options.update_in_backward:
        found.append(Buffer("slot", dtype, pinned=True))
    if options.split_master:
        found.append(Buffer("low", torch.int16, pinned=False))
        if not options.read_back:
            found.append(Buffer("high", dtype, pinned=True))
    else:
        found.append(Buffer("master", torch.float32, pinned=not half))
        if half and delayed:
            found.append(Buffer("fresh", dtype, pinned=True))
    if resting and (delayed or (half and not options.split_master)):
        found.append(Buffer("resting", dtype, pinned=True))
    if options.moments != "8bit":
        return found + [Buffer(name, options.moments, pinned=False) for name in moments]
    for name in moments:
        codes = torch.uint8 if name in NOT_NEGATIVE else torch.int8
        found += [Buffer(name, codes, pinned=False), Buffer(name + SCALES, torch.uint8, pinned=False, elements=TILE)]
    return found


def bytes_of(buffers: Sequence[Buffer], numel: int) -> HostBytes:
    """The memory of these buffers for this many elements."""
    sizes = [(aligned(buffer.numel(numel) * buffer.dtype.itemsize), buffer.pinned) for buffer in buffers]
    return HostBytes(sum(size for size, pinned in sizes if pinned), sum(size for size, pinned in sizes if not pinned))


class HostBuffers:
    """The buffers of one flat's range in host memory."""

    stored: Tensor
    """The kernel's master: fp32, or the low half of a split master. A frozen flat has none."""

    def __init__(self, options: Offload, dtype: torch.dtype, numel: int, moments: Sequence[str] | None = None) -> None:
        self.dtype, self.numel = dtype, numel
        self.parameter_bytes = numel * dtype.itemsize
        self.trained = moments is not None
        self.moment_names = tuple(moments or ())
        self.split = options.split_master and self.trained
        self.coded = options.moments == "8bit"
        self.rests_here = options.parameters == "cpu"
        self._wanted = wanted(options, dtype, moments)
        self.bytes = bytes_of(self._wanted, numel)
        """The size of all buffers except ``total``."""
        self.tensors: dict[str, Tensor] = {}
        """The buffers by name."""
        self.slot: Tensor | None = None
        self.high: Tensor | None = None
        self.resting: Tensor | None = None
        """The parameters, if they live on the host. May be the same memory as ``high`` or ``master``."""

    def bind(self, pinned: HostBlock, pageable: HostBlock) -> None:
        """Takes the buffers from blocks of host memory."""
        tensors = self.tensors
        for buffer in self._wanted:
            block = pinned if buffer.pinned else pageable
            tensors[buffer.name] = block.take(buffer.numel(self.numel), buffer.dtype)
        self.slot, self.high = tensors.get("slot"), tensors.get("high")
        if self.trained:
            self.stored = tensors["low" if self.split else "master"]
        if self.rests_here:
            self.resting = next(tensors[name] for name in ("resting", "high", "master") if name in tensors)

    def store(self, values: Tensor) -> None:
        """Takes fp32 values for the master, or for the low half of a split master."""
        if not self.split:
            self.stored.copy_(values)
            return
        for target, part_of_values in zip(self.stored.split(SLICE), values.split(SLICE), strict=True):
            target.copy_(remainder(part_of_values))

    def output(self, gradient: Tensor) -> Tensor:
        """Where an update with this gradient writes the new parameters. Not for a high half that is read back."""
        if self.dtype is torch.float32:
            return self.stored
        names = [name for name in ("high", "fresh", "resting", "slot") if name in self.tensors]
        return self.tensors[names[0]] if names else gradient

    def moments(self, piece: Piece) -> dict[str, Tensor]:
        """The moments of one piece, by name. Moments in 8 bits can only be read."""
        stored, scales = self.stored_moments(piece)
        shown = map(CodedMoment, stored, scales) if self.coded else stored
        return dict(zip(self.moment_names, shown, strict=True))

    def stored_moments(self, piece: Piece) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The moments of one piece as the kernel reads them, and the scales of codes."""
        tiles = slice(piece.offset // TILE, -(-(piece.offset + piece.numel) // TILE))
        stored = tuple(part(self.tensors[name], piece) for name in self.moment_names)
        return stored, tuple(self.tensors[name + SCALES][tiles] for name in self.moment_names if self.coded)

    def store_moment(self, piece: Piece, name: str, values: Tensor) -> None:
        """Takes values for a moment in 8 bits."""
        stored, scales = self.stored_moments(piece)
        number = self.moment_names.index(name)
        encode(values, stored[number], scales[number])

    def forget_moments(self) -> None:
        """Sets all moments to 0."""
        for name in self.moment_names:
            for buffer in (name, name + SCALES) if self.coded else (name,):
                self.tensors[buffer].zero_()

    def total(self) -> Tensor:
        """The buffer for sums, made with the first call."""
        if "total" not in self.tensors:
            self.tensors["total"] = torch.empty(self.numel, dtype=torch.float32, device="cpu")
        return self.tensors["total"]


def part(buffer: Tensor, piece: Piece) -> Tensor:
    """The part of a buffer that belongs to a piece."""
    return buffer[piece.offset : piece.offset + piece.numel]


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Fp32 values as parameters. Rounds to bf16 half away from zero, as the kernel does, and to other dtypes as torch.

    Half away from zero makes a split master exact: the bf16 value and a 16-bit remainder give the same fp32 bits again.
    """
    if dtype is not torch.bfloat16:
        return values.to(dtype)
    rounded = torch.empty_like(values, dtype=torch.int16)
    for target, part_of_values in zip(rounded.split(SLICE), values.split(SLICE), strict=True):
        target.copy_(_high(part_of_values))
    return rounded.view(torch.bfloat16)


def remainder(values: Tensor) -> Tensor:
    """The low half of a split master: what rounding to bf16 loses."""
    return (_bits(values) - (_high(values) << 16)).to(torch.int16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 values of a split master."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def _bits(values: Tensor) -> Tensor:
    """The bits as integers. Every NaN gets the same bits: with other bits, an addition could give a zero."""
    return torch.where(values.isnan(), 0x7FC00000, values.view(torch.int32))


def _high(values: Tensor) -> Tensor:
    return (_bits(values) + 0x8000) >> 16  # an arithmetic shift: the sign stays
