"""The host optimizer: unscale, clip, weight decay, Adam or SGD and the cast to 16 bits, in one pass over memory.

    pool = Pool()
    segments = pool.prepare([Segment(...), ...])               # memory addresses, once
    pool.update([(segments, rules)], factor=clip / scale)      # hyper-parameters, every step

A *segment* is a range of one parameter with its gradient, master and moments. A call releases the GIL and sleeps until
the pool's threads are done. The native paths (`library.Simd`) give the same bits, whatever the number of threads and
however a parameter is cut into segments. Torch's path agrees with them within rounding.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..system.cores import share
from . import fallback
from .codes import TILE
from .library import NUMBERS, Choice, Simd, choose, load, warn_once
from .rules import Rule, pack_rule

KINDS: Final = {
    torch.float32: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int16: 4,
    torch.int8: 5,
    torch.uint8: 6,
}
"""``Kind`` of native/abi.h, by dtype. int16 is the low half of a split master; int8 and uint8 are codes."""
ABSENT: Final = 0
GRADIENTS: Final = (torch.float32, torch.bfloat16, torch.float16)
_CLOSED: Final = 1  # Status of native/library.cpp
_SEGMENT: Final = struct.Struct("=7Q2qQ5i4x")


@dataclass(frozen=True)
class Segment:
    """A contiguous range of one parameter. All tensors are 1-D, contiguous, on the CPU and equally long."""

    gradient: Tensor
    """bf16, fp16 or fp32."""
    master: Tensor
    """fp32. With a split master int16: the low half, whose high half is `parameter`."""
    parameter: Tensor | None
    """Where the 16-bit parameter is written. It may have the gradient's memory. None: parameters are fp32, the master.

    With a split master the parameter is bf16, and is read too.
    """
    moments: tuple[Tensor, ...]
    """Adam: exp_avg and exp_avg_sq. SGD: the momentum buffer, or none.

    fp32, or rounded stochastically: bf16, or codes in 8 bits (``codes.py``), int8 for the first moment and uint8 for
    the second.
    """
    key: int
    """64 bits that identify the parameter, for stochastic rounding."""
    start: int
    """Index of the first element within the parameter, for stochastic rounding. With codes, a multiple of a tile."""
    scales: tuple[Tensor, ...] = ()
    """The scales of moments that are codes."""

    def validate(self) -> None:
        """Raises if the native code would read or write wrong memory."""
        length, is_split = self.gradient.numel(), self.master.dtype is torch.int16
        arrays = [("gradient", self.gradient, GRADIENTS), ("master", self.master, (torch.float32, torch.int16))]
        if self.parameter is not None:
            high = (torch.bfloat16,) if is_split else (torch.bfloat16, torch.float16)
            arrays.append(("parameter", self.parameter, high))
        elif is_split:
            raise ValueError("a split master needs a bf16 parameter as its high half")
        dtypes = [(torch.int8,), (torch.uint8,)] if self.scales else [(torch.float32, torch.bfloat16)] * 2
        arrays += [("moment", *moment) for moment in zip(self.moments, dtypes, strict=False)]
        for name, tensor, allowed in arrays:
            _check_array(name, tensor, allowed, length)
        scales = [("scales", tensor, (torch.uint8,)) for tensor in self.scales]
        for name, tensor, allowed in scales:
            _check_array(name, tensor, allowed, -(-length // TILE))
        if scales and (len(scales) != len(self.moments) or self.start % TILE):
            raise ValueError(
                f"{len(self.moments)} moments in 8 bits from element {self.start} on have {len(scales)} arrays of "
                f"scales; each needs one, and the first element must be a multiple of {TILE}"
            )
        arrays += scales
        # Elements are read and written in any order, so two arrays may share all of their memory or none.
        spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor, _ in arrays)
        for (begin, end, name), (other_begin, other_end, other) in itertools.pairwise(spans):
            same = {name, other} == {"gradient", "parameter"} and (begin, end) == (other_begin, other_end)
            if other_begin < end and (is_split or not same):
                raise ValueError(
                    f"{name} and {other} overlap; only a 16-bit parameter with an fp32 master may do so, "
                    "exactly over its gradient"
                )

    def pack(self) -> bytes:
        """`struct Segment` of native/abi.h."""
        moments = (*self.moments, None, None)[:2]
        gradient, master, parameter = self.gradient, self.master, self.parameter
        arrays = (gradient, master, parameter, *moments)
        scales = (*self.scales, None, None)[:2]
        addresses = (0 if array is None else array.data_ptr() for array in (*arrays, *scales))
        kinds = (ABSENT if array is None else KINDS[array.dtype] for array in arrays)
        return _SEGMENT.pack(*addresses, gradient.numel(), self.start, self.key % 2**64, *kinds)


class Segments(NamedTuple):
    """Segments that were checked, and their packed form: the addresses of their memory."""

    checked: Sequence[Segment]
    packed: bytes


class Pool:
    """Threads that update parameters on the host, each bound to a core where this rank has enough cores.

    Any thread may call the pool; calls take turns. A forked child gets threads of its own with its first call.

    Args:
        threads: how many; by default the cores that this process may use, divided by the ranks on this machine.
        simd: the path to take; by default the path in `ZEROSHARD_KERNEL`, or the best path that works here.

    >>> pool = Pool(threads=1)
    >>> pool.square_sum(torch.tensor([3.0, 4.0]))
    25.0
    >>> pool.close()
    """

    def __init__(self, threads: int | None = None, simd: Simd | None = None) -> None:
        mine = share(threads)
        self.threads = mine.threads
        self.choice: Choice = choose(simd)
        self._close: weakref.finalize[..., Pool] | None = None
        if self.choice.simd is Simd.TORCH:
            if self.choice.remedy:
                warn_once(
                    f"zeroshard updates parameters on the host with torch's fused optimizers, which is slower: "
                    f"{self.choice.reason}; {self.choice.remedy}"
                )
            return
        self._library = load()
        cores = (ctypes.c_int32 * len(mine.cores))(*mine.cores)
        self._handle = self._library.zeroshard_open(NUMBERS[self.choice.simd], mine.threads, cores, len(cores))
        if not self._handle:
            raise RuntimeError(f"{mine.threads} threads for the host optimizer could not be started; ask for fewer")
        self._close = weakref.finalize(self, self._library.zeroshard_close, self._handle)  # also at interpreter exit

    @property
    def simd(self) -> Simd:
        """How this pool computes."""
        return self.choice.simd

    @property
    def native(self) -> bool:
        """Whether this pool can do moments in 16 and 8 bits, and split masters."""
        return self.simd is not Simd.TORCH

    def prepare(self, segments: Sequence[Segment]) -> Segments:
        """Checks segments and notes their addresses, so that they can be updated many times."""
        for segment in segments:
            segment.validate()
        return Segments(segments, b"".join(segment.pack() for segment in segments) if self.native else b"")

    def update(self, work: Sequence[tuple[Segments, Sequence[Rule]]], factor: float, seed: int = 0) -> None:
        """One step of all segments, in one call.

        Args:
            work: what ``prepare`` returned, with one rule for each segment.
            factor: gradients are multiplied by it in fp32: unscaling times clipping.
            seed: of the stochastic rounding of moments.
        """
        pairs = [pair for segments, rules in work for pair in zip(segments.checked, rules, strict=True)]
        packed_rules = b"".join(pack_rule(rule, len(segment.moments)) for segment, rule in pairs)
        if self.native:
            addresses = b"".join(segments.packed for segments, _ in work)
            arguments = (addresses, packed_rules, len(pairs), factor, seed % 2**64)
            self._check(self._library.zeroshard_update(self._handle, *arguments))
        else:
            fallback.update(pairs, factor)

    def accumulate(self, total: Tensor, gradient: Tensor, *, first: bool) -> None:
        """Adds a gradient to an fp32 total. The ``first`` gradient replaces the total."""
        count = gradient.numel()
        _check_array("gradient", gradient, GRADIENTS, count)
        _check_array("total", total, (torch.float32,), count)
        if self.native:
            arguments = (total.data_ptr(), gradient.data_ptr(), KINDS[gradient.dtype], first, count)
            self._check(self._library.zeroshard_accumulate(self._handle, *arguments))
        else:
            fallback.accumulate(total, gradient, first)

    def square_sum(self, values: Tensor) -> float:
        """The sum of squares in fp64. The order of additions depends on nothing but the length."""
        count = values.numel()
        _check_array("values", values, GRADIENTS, count)
        if not self.native:
            return fallback.square_sum(values)
        result = ctypes.c_double()
        arguments = (values.data_ptr(), KINDS[values.dtype], count, result)
        self._check(self._library.zeroshard_square_sum(self._handle, *arguments))
        return result.value

    def close(self) -> None:
        """Waits for a running call, then ends the threads. Later calls raise; closing again does nothing."""
        if self._close is not None:
            self._close()

    def _check(self, status: int) -> None:
        if status == _CLOSED:
            raise RuntimeError("the host optimizer's pool is closed")
        if status:
            raise RuntimeError(f"threads for the host optimizer could not be started in process {os.getpid()}")


def _check_array(name: str, tensor: Tensor, dtypes: Iterable[torch.dtype], length: int) -> None:
    """Raises if the native code cannot read a tensor as this many elements of these dtypes."""
    on_cpu, flat = tensor.device.type == "cpu", tensor.dim() == 1 and tensor.is_contiguous()
    if not (on_cpu and flat and tensor.dtype in dtypes and tensor.numel() == length):
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}; the host optimizer needs "
            f"{length} contiguous elements of {' or '.join(map(str, dtypes))} on the CPU"
        )
