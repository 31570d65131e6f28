"""Blocks that are recomputed in backward, and what is kept of their inputs until then.

``torch.utils.checkpoint`` recomputes, with random numbers, autocast and early stopping as it does; it is given a
function without inputs, which takes them from where they were put. The inputs of the block before are brought back
while a block is recomputed and its gradients are computed.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..comm import parallel
from ..comm.fabric import DisagreementError
from ..system import compat
from ..system.hook import Hook
from ..system.structures import map_leaves, map_tensors
from .kept import Kept, Stores, changed_in_place

Result = TypeVar("Result")


class Call:
    """One call of a checkpointed function: what is kept of its inputs."""

    def __init__(self, checkpoints: Checkpoints, arguments: Any, previous: Call | None, name: str) -> None:
        self._checkpoints = checkpoints
        self._previous = None if previous is None else weakref.ref(previous)
        self._kept: dict[int, Kept] = {}
        self._originals: list[tuple[Tensor, int]] = []
        weakref.finalize(self, _drop_all, self._kept).atexit = False  # also of a call that fails midway
        found = 0

        def put(value: Tensor) -> Any:
            nonlocal found
            if not _is_activation(value):
                return value  # masks, tables and parameters, which others hold too
            if id(value) not in self._kept:
                checkpoints.check_same(value, f"{name}.{found}")
                self._kept[id(value)] = Kept(value, checkpoints.stores, f"{name}.{found}")
                self._originals.append((value, compat.version(value)))
                found += 1
            return _Place(self._kept[id(value)])

        self._arguments = map_tensors(put, arguments)

    def check_unwritten(self) -> None:
        """After the first run: inputs that it changed in place would come back otherwise than they went."""
        for tensor, version in self._originals:
            if compat.version(tensor) != version:
                raise changed_in_place("a checkpointed block changed one of its inputs in place")
        self._originals.clear()

    def previous(self) -> Call | None:
        """The call before this one in the same forward, if its graph is still there."""
        return None if self._previous is None else self._previous()

    def fetch(self) -> None:
        """Starts bringing the inputs back."""
        for kept in self._kept.values():
            kept.fetch()

    def take(self) -> Any:
        """The inputs again, while those of the calls before are on their way."""
        self.fetch()
        call: Call | None = self
        for _ in range(self._checkpoints.stores.options.prefetch):
            call = None if call is None else call.previous()
            if call is not None:
                call.fetch()
        taken = {kept: kept.take() for kept in self._kept.values()}
        return map_leaves(_Place, lambda place: taken[place.kept], self._arguments)


class _Place:
    """Stands in a structure of arguments where a tensor was."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept


def _is_activation(value: Tensor) -> bool:
    """Whether a tensor is the model's own and of this pass, rather than a mask, a table or a parameter."""
    return value.is_floating_point() and value.requires_grad and not value.is_leaf


def _drop_all(kept: dict[int, Kept]) -> None:
    for entry in kept.values():
        entry.drop()


class _Recomputed(Hook):
    """A block's forward that is recomputed. A graph that is compiled around it ends there, which must be said."""

    __slots__ = ("_say",)

    def __init__(self, name: str, function: Callable[..., Any], said: list[str]) -> None:
        """``said`` is shared by a model's blocks: of many that are compiled alike, one is named."""
        super().__init__(function)

        def say() -> None:
            if not said:
                said.append(name)
                warnings.warn(
                    f"{name!r} is compiled around what activations= recomputes, and so runs uncompiled, it and blocks "
                    "like it; compile each block by itself, not the model, and before shard(), as in "
                    "model.blocks[0] = torch.compile(model.blocks[0])",
                    stacklevel=2,
                )

        self._say = compat.untraced(say)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            self._say()
        return self._function(*args, **kwargs)


class Checkpoints:
    """The checkpoints of one model."""

    def __init__(self, stores: Stores) -> None:
        self.stores = stores
        self._last: weakref.ref[Call] | None = None
        self._calls = 0
        self._checked: set[str] = set()
        self._said: list[str] = []

    def watch(self, model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> None:
        """Makes ``zeroshard.checkpoint`` inside the model's forward use these, and recomputes the given blocks."""
        model.register_forward_pre_hook(Hook(self._begin), prepend=True)
        model.register_forward_hook(Hook(self._end), always_call=True)
        for name, module in blocks:
            module.forward = self._recomputed(name, module.forward)

    def _recomputed(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def recomputed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if compat.in_backward():
                raise RuntimeError(
                    f"{name!r} is recomputed by activations= and, around it, by the model's own checkpointing; turn "
                    "that off (Hugging Face: gradient_checkpointing_disable()), or use Activations(checkpoint=False)"
                )
            if kwargs.get("past_key_values") is not None:
                raise RuntimeError(
                    f"{name!r} is recomputed by activations=, which would write to its key-value cache twice; train "
                    "with model.config.use_cache = False"
                )
            return self.run(forward, args, kwargs)

        return _Recomputed(name, recomputed, self._said)

    def _begin(self, model: nn.Module, args: Any) -> None:
        if not compat.in_backward():
            self._last, self._calls = None, 0
            _active.append(self)

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if not compat.in_backward() and self in _active:
            del _active[_active.index(self) :]

    def run(self, function: Callable[..., Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
        """Calls a function now, and again in backward, on inputs that are put away until then."""
        name = f"checkpoint {self._calls}"
        self._calls += 1
        call = Call(self, (args, kwargs), None if self._last is None else self._last(), name)
        self._last = weakref.ref(call)
        now: list[Any] = [(args, kwargs)]

        def body(_: Tensor) -> Result:
            positional, named = now.pop() if now else call.take()
            with _inside(self):
                return function(*positional, **named)

        # The tensor tells torch whose random state to save.
        result: Result = torch_checkpoint(body, torch.empty(0, device=self.stores.fabric.device), use_reentrant=False)
        call.check_unwritten()
        return result

    def check_same(self, tensor: Tensor, name: str) -> None:
        """In the first step: what is to be divided must be the same on all ranks that divide it."""
        fabric = self.stores.fabric
        if self.stores.parts_of(tensor) == 1 or name in self._checked or fabric.backend == "fake":
            return
        self._checked.add(name)
        part = parallel.local(tensor.detach()).double()
        sums = fabric.model.gather_small(torch.stack([part.sum(), part.square().sum()]))
        if not torch.equal(sums.nan_to_num(), sums[:1].nan_to_num().expand_as(sums)):
            raise DisagreementError(
                f"activations.partition: an input of {name!r} differs among tensor-parallel ranks, so it cannot be "
                "divided among them; sequence parallelism divides it already, so leave partition out"
            )


_active: list[Checkpoints] = []
"""Those of the models whose forward is running, outermost first."""


@contextmanager
def _inside(checkpoints: Checkpoints) -> Iterator[None]:
    _active.append(checkpoints)
    try:
        yield
    finally:
        _active.remove(checkpoints)


def checkpoint(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Calls ``function`` and recomputes it in backward, so that of what it makes only its inputs are kept.

    Inside the forward of a model that was sharded with ``activations=``, these inputs are divided among model-parallel
    ranks or wait on the host, as that says; elsewhere they stay as they are. Structures of tensors, of any shape, are
    taken as they come, and random numbers are the same the second time.

    >>> x = torch.ones(3, requires_grad=True)
    >>> checkpoint(torch.sin, 2 * x).sum().backward()
    >>> bool(torch.allclose(x.grad, 2 * torch.cos(2 * torch.ones(3))))
    True
    """
    if _active:
        return _active[-1].run(function, args, kwargs)
    result: Result = torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    return result
