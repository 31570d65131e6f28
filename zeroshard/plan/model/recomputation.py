"""Recomputes the blocks of a traced module in backward, as ``shard(activations=...)`` does.

The order of events is that of the ``recompute`` room, so the trace sees the same tensors alive. A checkpoint on the
host does not exist in the trace until it comes back; only its size is counted.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...config.bounds import ON_THEIR_WAY
from ...config.options import Activations
from ...recompute.part import part_of
from ...system import compat
from ...system.structures import map_leaves, map_tensors


class Recomputation:
    """The checkpoints of one forward and backward."""

    def __init__(self, options: Activations, degree: int, units: int) -> None:
        """``degree``: the ranks that divide checkpoints among them, if the options say so."""
        self.options = options
        self.ranks = degree if options.partition else 1
        self.stored: list[list[int]] = [[] for _ in range(units)]
        """By block: the elements of each tensor that is stored."""
        self.leaving: deque[Tensor] = deque(maxlen=ON_THEIR_WAY)
        """Checkpoints whose copies to the host are not finished."""
        self._last: weakref.ref[_Call] | None = None

    @contextmanager
    def recompute(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """In this context, backward recomputes these blocks."""
        own = [vars(block).get("forward") for block in blocks]
        for number, block in enumerate(blocks, start=1):
            block.forward = self._recomputed(block.forward, number)
        try:
            yield
        finally:
            for block, forward in zip(blocks, own, strict=True):
                if forward is None:
                    del block.forward
                else:
                    block.forward = forward

    def _recomputed(self, forward: Callable[..., Any], number: int) -> Callable[..., Any]:
        def recomputed(*args: Any, **kwargs: Any) -> Any:
            if compat.in_backward():
                raise RuntimeError("the module recomputes its blocks itself; turn that off, or leave it to the module")
            if kwargs.get("past_key_values") is not None:
                raise RuntimeError("a block that is recomputed would write to its cache twice; set use_cache = False")
            call = _Call(self, number, (args, kwargs), None if self._last is None else self._last())
            self._last = weakref.ref(call)
            now: list[Any] = [(args, kwargs)]
            del args, kwargs

            def body() -> Any:
                positional, named = now.pop() if now else call.take()
                return forward(*positional, **named)

            return checkpoint(body, use_reentrant=False)

        return recomputed


class _Call:
    """One call of a block, with the checkpoints of its inputs."""

    def __init__(self, all_: Recomputation, number: int, arguments: Any, previous: _Call | None) -> None:
        self._all, self._previous = all_, None if previous is None else weakref.ref(previous)
        checkpoints: dict[int, _Checkpoint] = {}

        def put(value: Tensor) -> Any:
            if not value.is_floating_point() or not value.requires_grad or value.is_leaf:
                return value
            if id(value) not in checkpoints:
                checkpoints[id(value)] = _Checkpoint(value, number, all_)
            return checkpoints[id(value)]

        self._arguments = map_tensors(put, arguments)
        self._checkpoints = list(checkpoints.values())

    def fetch(self, ahead: int) -> None:
        """Brings the inputs back, and those of ``ahead`` earlier calls."""
        for one in self._checkpoints:
            one.fetch()
        previous = None if self._previous is None else self._previous()
        if ahead and previous is not None:
            previous.fetch(ahead - 1)

    def take(self) -> Any:
        self._all.leaving.clear()
        self.fetch(self._all.options.prefetch)
        taken = {one: one.take() for one in self._checkpoints}
        return map_leaves(_Checkpoint, taken.__getitem__, self._arguments)


class _Checkpoint:
    """A tensor that is stored from forward to backward: on the device or on the host, whole or one rank's part."""

    def __init__(self, tensor: Tensor, number: int, all_: Recomputation) -> None:
        there = tensor.detach()
        self._moves = all_.options.offload or all_.ranks > 1
        self._form = (there.shape, there.stride(), there.dtype)
        self._tensor: Tensor | None = None if self._moves else there
        part = part_of(there.numel(), all_.ranks)
        stored = min(part, there.numel())
        self._part = torch.empty(
            0 if all_.options.offload or not self._moves else stored, dtype=there.dtype, device="meta"
        )
        all_.stored[number].append(there.numel())
        if all_.options.offload:
            all_.leaving.append(there)

    def fetch(self) -> None:
        if self._tensor is None:
            shape, stride, dtype = self._form
            self._tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def take(self) -> Tensor:
        self.fetch()
        assert self._tensor is not None
        taken = self._tensor.detach().requires_grad_()
        if self._moves:
            self._tensor, self._part = None, self._part[:0].clone()
        return taken
