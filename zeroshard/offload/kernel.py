"""The host optimizer: unscale, clip, weight decay, Adam or SGD and the cast to 16 bits, in one pass over memory.

    pool = Pool()
    batch = pool.prepare(segments)                  # addresses, once
    batch.run(rules, factor=clip / scale)           # hyper-parameters, every step

Calls release the GIL and sleep until the pool's own threads are done. Results do not depend on the number of threads,
on how a parameter is cut into segments, or on the SIMD path (`library.Simd`), but for torch's.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ..system.cores import share
from . import fallback
from .library import Choice, Simd, choose, load, path_number, warn_once
from .segment import GRADIENTS, AdamRule, Rule, Segment, SGDRule, pack_rule, pack_segment, require_values

__all__ = ["AdamRule", "Batch", "Pool", "Rule", "SGDRule", "Segment", "Simd"]

_CLOSED: Final = 1  # Status of native/library.cpp
_MASK_64: Final = 2**64 - 1


class Pool:
    """Threads that update parameters on the host, each bound to a core where this rank has enough of them.

    Any thread may call it; calls take turns. A forked child gets threads of its own when it first calls.

    Args:
        threads: how many; by default the cores that this process may use, divided by the ranks on this machine.
        simd: the path to take; by default what `ZEROSHARD_KERNEL` says, or the best there is.

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
        number = path_number(self.choice.simd)
        self._handle = self._library.zeroshard_open(number, mine.threads, cores, len(cores))
        if not self._handle:
            raise RuntimeError(f"{mine.threads} threads for the host optimizer could not be started; ask for fewer")
        self._close = weakref.finalize(self, self._library.zeroshard_close, self._handle)  # also at interpreter exit

    @property
    def simd(self) -> Simd:
        """How this pool computes."""
        return self.choice.simd

    @property
    def native(self) -> bool:
        """Whether 16-bit moments and split masters are to be had."""
        return self.simd is not Simd.TORCH

    def prepare(self, segments: Sequence[Segment]) -> Batch:
        """Check segments and remember where they are, for updating them many times."""
        return Batch(self, segments)

    def update(self, segments: Sequence[Segment], factor: float, seed: int = 0) -> None:
        """One step of every segment by its own rule.

        Args:
            segments: what to update; an empty one is fine.
            factor: what gradients are multiplied by, in fp32: unscaling times clipping.
            seed: of the stochastic rounding of bf16 moments.
        """
        rules = [segment.rule for segment in segments if segment.rule is not None]
        if len(rules) != len(segments):
            raise ValueError("a segment has no rule; give it one, or prepare() a batch and run() it with rules")
        self.prepare(segments).run(rules, factor, seed)

    def accumulate(self, total: Tensor, gradient: Tensor, factor: float = 1.0, *, first: bool) -> None:
        """Add a gradient times a factor to an fp32 total, or replace the total by it if it is the first."""
        require_values("gradient", gradient)
        require_values("total", total)
        if total.dtype is not torch.float32 or total.numel() != gradient.numel():
            raise ValueError(
                f"total must be torch.float32 of {gradient.numel()} elements like the gradient, "
                f"not {total.dtype} of {total.numel()}"
            )
        if not self.native:
            fallback.accumulate(total, gradient, factor, first)
            return
        kind, count = GRADIENTS[gradient.dtype], gradient.numel()
        self._check(
            self._library.zeroshard_accumulate(
                self._handle, total.data_ptr(), gradient.data_ptr(), kind, factor, first, count
            )
        )

    def square_sum(self, values: Tensor) -> float:
        """The sum of squares in fp64, added up in an order that depends on nothing but the length."""
        require_values("values", values)
        if not self.native:
            return fallback.square_sum(values)
        result = ctypes.c_double()
        kind, count = GRADIENTS[values.dtype], values.numel()
        self._check(self._library.zeroshard_square_sum(self._handle, values.data_ptr(), kind, count, result))
        return result.value

    def close(self) -> None:
        """Wait for a running call, then end the threads. Later calls raise; closing again does nothing."""
        if self._close is not None:
            self._close()

    def run_packed(self, segments: bytes, rules: bytes, count: int, factor: float, seed: int) -> None:
        """What `Batch` calls: the structures of native/abi.h."""
        self._check(self._library.zeroshard_update(self._handle, segments, rules, count, factor, seed & _MASK_64))

    def _check(self, status: int) -> None:
        if status == _CLOSED:
            raise RuntimeError("the host optimizer's pool is closed")
        if status:
            raise RuntimeError(f"threads for the host optimizer could not be started in process {os.getpid()}")


class Batch:
    """Segments whose addresses are known, to be updated in one call. It keeps their tensors alive."""

    def __init__(self, pool: Pool, segments: Sequence[Segment]) -> None:
        self.pool = pool
        self._segments = tuple(segments)
        for segment in self._segments:
            segment.validate()
            if not pool.native:
                fallback.refuse(segment)
        self.packed = b"".join(map(pack_segment, self._segments)) if pool.native else b""
        self._moments = [len(segment.moments) for segment in self._segments]

    def run(self, rules: Sequence[Rule], factor: float, seed: int = 0) -> None:
        """One step, a rule for each segment. See `Pool.update`."""
        packed = self.pack(rules)
        if self.pool.native:
            self.pool.run_packed(self.packed, packed, len(rules), factor, seed)
        else:
            fallback.update(self._segments, rules, factor)

    def pack(self, rules: Sequence[Rule]) -> bytes:
        """Rules as the native code reads them."""
        if len(rules) != len(self._segments):
            raise ValueError(f"{len(rules)} rules for {len(self._segments)} segments; each needs one")
        return b"".join(map(pack_rule, rules, self._moments))


def run_together(batches: Sequence[Batch], rules: Sequence[Sequence[Rule]], factor: float, seed: int = 0) -> None:
    """One step of several batches of one pool in a single call. See `Batch.run`."""
    pool = batches[0].pool
    if not pool.native:
        for batch, chosen in zip(batches, rules, strict=True):
            batch.run(chosen, factor, seed)
        return
    packed = b"".join(batch.pack(chosen) for batch, chosen in zip(batches, rules, strict=True))
    pool.run_packed(b"".join(batch.packed for batch in batches), packed, sum(map(len, rules)), factor, seed)
