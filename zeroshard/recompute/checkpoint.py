"""Blocks that run again in backward, so that only their inputs are stored from forward to backward.

``torch.utils.checkpoint`` runs the block again, with the same random numbers and autocast, and stops as early as
possible. It is given a function without inputs. That function takes the block's inputs from where they were saved.
While one block runs again and its gradients are computed, the inputs of the block before it are brought back.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..comm import parallel
from ..comm.fabric import DisagreementError, Fabric
from ..config.options import Activations
from ..system import compat, compat_compile
from ..system.hook import Hook
from ..system.structures import map_leaves, map_tensors
from .choice import Choice
from .saved_input import MovedInput, SavedInput
from .store import CheckpointStore, VersionWatch

Result = TypeVar("Result")


class Call:
    """One call of a recomputed function, and its saved inputs."""

    def __init__(
        self, checkpoints: ActivationCheckpoints, arguments: Any, previous: Callable[[], Call | None], name: str
    ) -> None:
        self.previous = previous
        """The call before this one in the same forward; None if there is none, or its graph is gone."""
        self._saved: dict[int, SavedInput] = {}
        self._watches: list[VersionWatch] = []
        weakref.finalize(self, _drop_all, self._saved).atexit = False  # also after a call that failed midway

        def save(value: Tensor) -> Any:
            if not _is_activation(value):
                return value  # masks, tables and parameters: they exist anyway
            if id(value) not in self._saved:
                self._saved[id(value)] = checkpoints.save(value, f"{name}.{len(self._saved)}")
                self._watches.append(VersionWatch(value))
            return self._saved[id(value)]

        self._arguments = map_tensors(save, arguments)

    def check_unwritten(self) -> None:
        """After the first run: raises if the function changed its inputs in place."""
        for watch in self._watches:
            watch.check("a checkpointed block changed one of its inputs in place")
        self._watches.clear()

    def fetch(self) -> None:
        """Starts bringing the inputs back."""
        for saved in self._saved.values():
            saved.fetch()

    def take(self, prefetch: int) -> Any:
        """The inputs as they were. Also starts to bring back the inputs of the ``prefetch`` calls before this one."""
        call: Call | None = self
        for _ in range(1 + prefetch):
            if call is not None:
                call.fetch()
                call = call.previous()
        taken = {saved: saved.take() for saved in self._saved.values()}
        return map_leaves(SavedInput, taken.__getitem__, self._arguments)


def _is_activation(value: Tensor) -> bool:
    """Whether the model made this tensor in this forward: not a mask, a table or a parameter."""
    return value.is_floating_point() and value.requires_grad and not value.is_leaf


def _drop_all(saved: dict[int, SavedInput]) -> None:
    for entry in saved.values():
        entry.drop()


def _no_call() -> None:
    """Stands for the call before the first one."""


class RecomputedForward(Hook):
    """The forward of a recomputed block. What is compiled is the forward inside, not what stores and recomputes."""

    __slots__ = ("_compiled", "_ordinary", "_warn")

    def __init__(
        self,
        run: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
        forward: Callable[..., Any],
        warn: Callable[[], None],
    ) -> None:
        super().__init__(compat_compile.untraced(run))
        self._ordinary = self._compiled = forward
        self._warn = compat_compile.untraced(warn)

    def compile(self, compiler: compat_compile.Compiler | None) -> None:
        """Compiles the forward inside. None: makes it ordinary again."""
        self._compiled = compat_compile.compiled(compiler, self._ordinary)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            self._warn()
        return self._function(self._compiled, args, kwargs)


class ActivationCheckpoints:
    """The checkpoints of one model."""

    def __init__(self, options: Activations, fabric: Fabric) -> None:
        self.store = CheckpointStore(options, fabric)
        self._last: Callable[[], Call | None] = _no_call
        self._calls = 0
        self._compared: set[str] = set()
        self._warned = False
        self.blocks = 0
        """How many blocks are recomputed, or may be."""
        self.choice: Choice | None = None
        """With ``recompute="auto"``: decides how many of them are."""
        self._first = 0
        """Blocks are recomputed if their number is below this, in the forward that runs."""

    def attach(self, model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> None:
        """Recomputes the given blocks. ``zeroshard.checkpoint`` inside the model's forward saves its inputs here."""
        model.register_forward_pre_hook(Hook(self._begin), prepend=True, with_kwargs=True)
        model.register_forward_hook(Hook(self._end), always_call=True)
        self.blocks = self._first = len(blocks)
        for number, (name, module) in enumerate(blocks):
            module.forward = self._recomputed(number, name, module.forward)

    @property
    def recomputed(self) -> int:
        """How many blocks are recomputed, in a forward that needs no more memory than what was measured."""
        decided = None if self.choice is None else self.choice.decided
        return self.blocks if decided is None else decided

    def _recomputed(self, number: int, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def recomputed(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if number >= self._first or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if compat.in_backward():
                raise RuntimeError(
                    f"{name!r} is recomputed by activations= and, around it, by the model's own checkpointing; turn "
                    "that off (Hugging Face: gradient_checkpointing_disable()), or leave activations= out"
                )
            if kwargs.get("past_key_values") is not None:
                raise RuntimeError(
                    f"{name!r} is recomputed by activations=, which would write to its key-value cache twice; train "
                    "with model.config.use_cache = False"
                )
            return self.run(forward, args, kwargs, number)

        return RecomputedForward(recomputed, forward, lambda: self._warn_of_compilation(name))

    def _warn_of_compilation(self, name: str) -> None:
        """Names one block, of many that are compiled alike."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{name!r}, which activations= recomputes, was called by a compiled function that does not call the "
                "model itself, and so runs uncompiled, it and blocks like it; compile each block by itself, as in "
                "model.blocks[0].compile(), or compile what calls the model",
                stacklevel=2,
            )

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not compat.in_backward():
            self._last, self._calls = _no_call, 0
            _active.append(self)
            if self.choice is not None and torch.is_grad_enabled() and not compat.in_transform():  # it hides sizes
                self._first = self.choice.begin_forward((args, kwargs))

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if not compat.in_backward() and self in _active:
            del _active[_active.index(self) :]
            if self.choice is not None:
                self.choice.end_forward()
                self._first = self.blocks  # a block that user code calls by itself may be given anything

    def run(
        self,
        function: Callable[..., Result],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        block: int | None = None,
    ) -> Result:
        """Calls a function now, and again in backward with its saved inputs. ``block``: the number of the block."""
        measured = self.choice if self.choice is not None and self.choice.measuring else None
        call = Call(self, (args, kwargs), self._last, f"checkpoint {self._calls}")
        self._last = weakref.ref(call)
        self._calls += 1
        now: list[Any] = [(args, kwargs)]

        def body(_: Tensor) -> Result:
            if not now and measured is not None:
                measured.recomputes(call)
            counting = _NOTHING
            if now and measured is not None and block is not None:
                counting = measured.saving(call, block, now[0])
            positional, named = now.pop() if now else call.take(self.store.options.prefetch)
            with _inside(self), counting:
                return function(*positional, **named)

        # The tensor tells torch which device's random state to save.
        result: Result = torch_checkpoint(body, torch.empty(0, device=self.store.fabric.device), use_reentrant=False)
        call.check_unwritten()
        return result

    def save(self, tensor: Tensor, name: str) -> SavedInput:
        """Saves one input of a call, in the way that the options ask for."""
        divides = self.store.parts_of(tensor) > 1
        if divides:
            self._compare(tensor, name)
        return MovedInput(tensor, self.store, name) if divides or self.store.host is not None else SavedInput(tensor)

    def _compare(self, tensor: Tensor, name: str) -> None:
        """In the first step: raises if the ranks that divide a tensor have different values of it."""
        fabric = self.store.fabric
        if name in self._compared or fabric.backend == "fake":
            return
        self._compared.add(name)
        part = parallel.local(tensor.detach()).double()
        sums = fabric.model.gather_small(torch.stack([part.sum(), part.square().sum()]))
        if not torch.equal(sums.nan_to_num(), sums[:1].nan_to_num().expand_as(sums)):
            raise DisagreementError(
                f"activations.partition: an input of {name!r} differs among tensor-parallel ranks, so it cannot be "
                "divided among them; sequence parallelism divides it already, so leave partition out"
            )


_NOTHING: AbstractContextManager[None] = nullcontext()

_active: list[ActivationCheckpoints] = []
"""The checkpoints of the models whose forward is running, outermost first."""


@contextmanager
def _inside(checkpoints: ActivationCheckpoints) -> Iterator[None]:
    depth = len(_active)
    _active.append(checkpoints)
    try:
        yield
    finally:
        del _active[depth:]


def checkpoint(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Calls ``function`` and runs it again in backward, so that only its inputs are stored until then.

    Inside the forward of a model that was sharded with ``activations=``, the inputs are divided among model-parallel
    ranks or wait on the host, as ``activations=`` says. Elsewhere they stay as they are. Inputs may be structures of
    tensors of any shape. Random numbers are the same in both runs.

    >>> x = torch.ones(3, requires_grad=True)
    >>> checkpoint(torch.sin, 2 * x).sum().backward()
    >>> bool(torch.allclose(x.grad, 2 * torch.cos(2 * torch.ones(3))))
    True
    """
    if _active:
        return _run(function, args, kwargs)
    result: Result = torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    return result


@compat_compile.untraced
def _run(function: Callable[..., Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    return _active[-1].run(function, args, kwargs)
