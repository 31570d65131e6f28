"""Which buffers a flat has in host memory, and what each is for.

- **slot**: the gradient as it lands, in the parameters' dtype; the update writes the new parameter over it. Absent
  where gradients are consumed as they land (``update_in_backward``), each in a buffer of a small ring.
- **master**: fp32. Split, it is **high**, the bf16 parameter itself, and **low**, the 16 bits that this one lacks.
- **moments**: what the optimizer keeps; named as torch names them.
- **fresh**: where a delayed update puts the new parameter while the slot takes the next gradient.
- **resting**: the parameters themselves, where these live on the host.
- **total**: the sum of several micro-batches in fp32, which exists once there was more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..config.layout import Piece
from ..config.offload import Offload
from .pinned import Block, aligned


class Buffer(NamedTuple):
    """A buffer that is wanted."""

    name: str
    dtype: torch.dtype
    pinned: bool


@dataclass(frozen=True)
class HostBytes:
    """What host memory a rank's states take."""

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
    """The buffers of a flat whose parameters have this dtype; without moments (None) it is frozen."""
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
    return found + [Buffer(name, options.moments, pinned=False) for name in moments]


def bytes_of(buffers: Sequence[Buffer], numel: int) -> HostBytes:
    """What they take for a range of this many elements."""
    sizes = [(aligned(numel * buffer.dtype.itemsize), buffer.pinned) for buffer in buffers]
    return HostBytes(sum(size for size, pinned in sizes if pinned), sum(size for size, pinned in sizes if not pinned))


class HostBuffers:
    """The buffers of one flat's range in host memory."""

    def __init__(
        self,
        options: Offload,
        dtype: torch.dtype,
        numel: int,
        moments: Sequence[str] | None = None,
    ) -> None:
        self.dtype, self.numel = dtype, numel
        self.trained = moments is not None
        self.moment_names = tuple(moments or ())
        self.split = options.split_master and self.trained
        self.rests_here = options.parameters == "cpu"
        self._wanted = wanted(options, dtype, moments)
        self._buffers: dict[str, Tensor] = {}
        self.total: Tensor | None = None

    @property
    def bytes(self) -> HostBytes:
        """What the buffers take; not ``total``, which comes with a second micro-batch."""
        return bytes_of(self._wanted, self.numel)

    def bind(self, pinned: Block, pageable: Block) -> None:
        """Takes the buffers from blocks of host memory."""
        for name, dtype, is_pinned in self._wanted:
            self._buffers[name] = (pinned if is_pinned else pageable).take(self.numel, dtype)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The buffers by name."""
        extra = {} if self.total is None else {"total": self.total}
        return {**self._buffers, **extra}

    @property
    def slot(self) -> Tensor | None:
        return self._buffers.get("slot")

    @property
    def high(self) -> Tensor | None:
        return self._buffers.get("high")

    @property
    def stored(self) -> Tensor:
        """What the kernel calls the master: fp32, or the remainders of a split one."""
        return self._buffers["low" if self.split else "master"]

    @property
    def resting(self) -> Tensor | None:
        """The parameters, where they live on the host."""
        if not self.rests_here:
            return None
        for name in ("resting", "high", "master"):
            if name in self._buffers:
                return self._buffers[name]
        raise AssertionError("parameters on the host without a buffer")

    def output(self, slot: Tensor) -> Tensor | None:
        """Where an update writes the 16-bit parameter; None where the master is the parameter.

        ``slot`` holds the gradient. A high half that is read back has its own place, which the caller knows.
        """
        if self.dtype is torch.float32:
            return None
        if self.split:
            return self.high
        for name in ("fresh", "resting"):
            if name in self._buffers:
                return self._buffers[name]
        return slot

    def moments(self, piece: Piece) -> dict[str, Tensor]:
        """The moments of one piece, by name."""
        return {name: part(self._buffers[name], piece) for name in self.moment_names}

    def new_total(self) -> Tensor:
        """The buffer for sums, made when it is first needed and kept."""
        if self.total is None:
            self.total = torch.empty(self.numel, dtype=torch.float32)
        return self.total


def part(buffer: Tensor, piece: Piece) -> Tensor:
    """The part of a buffer that belongs to a piece."""
    return buffer[piece.offset : piece.offset + piece.numel]


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Fp32 values as parameters: bf16 rounded half away from zero, as the kernel does it, others as torch rounds.

    That makes a split master exact: the rounded value and a 16-bit remainder are the same bits again, also on ties.
    """
    return _high(values).to(torch.int16).view(torch.bfloat16) if dtype is torch.bfloat16 else values.to(dtype)


def remainder(values: Tensor) -> Tensor:
    """What ``round_to`` bf16 leaves: the lower half of a split master."""
    return (_bits(values) - (_high(values) << 16)).to(torch.int16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """The fp32 values of a split master."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def _bits(values: Tensor) -> Tensor:
    """As integers. Every NaN as the same one: adding to another could carry into the sign and make it a zero."""
    return torch.where(values.isnan(), 0x7FC00000, values.view(torch.int32))


def _high(values: Tensor) -> Tensor:
    return (_bits(values) + 0x8000) >> 16  # an arithmetic shift: the sign stays
