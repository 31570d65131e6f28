"""Hooks: when units gather, reduce and release, seen from the model's own forward and backward.

A unit is gathered when its module is called, released after; gathered again when the gradient of its output arrives
(a tensor hook on the output) and released when the backward of another unit begins. Nothing depends on hooks coming
in pairs: recomputation stops early and skips them, a module may be called twice, and an exception ends a pass anywhere.

Which unit comes next is taken from the order of the last step, across its turns too: the first units of backward are
gathered under the end of forward, the first of the next forward under the update. Where the order turns out wrong it
costs a wait, never an error.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import parallel
from ..config.options import Config
from ..config.table import Extent, Place, StateTable
from ..optim.loss_scale import LossScaler
from ..optim.nonfinite import Faults
from ..states.flat import Flat
from ..states.gradient import hide_all
from ..states.unit import Unit
from ..system import compat, trace
from ..system.hook import Hook
from ..system.structures import cast_floating, map_tensors
from .order import Order
from .outputs import LeftInAttributes, hook_outputs
from .reducer import Reducer


class Schedule:
    """Drives the units of one model from its hooks."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        *,
        table: StateTable,
        config: Config,
        reducer: Reducer,
        scaler: LossScaler | None,
        faults: Faults,
    ) -> None:
        self._faults = faults
        self._root, self._units = units[0], units
        self._frozen_flats = [flat for unit in units for flat in unit.flats if not flat.trainable]
        self._sharded = table.parameters.extent is Extent.SHARD
        self._published_late = table.optimizer.extent is Extent.SHARD or table.optimizer.place is Place.HOST
        self._config, self._reducer, self._scaler = config, reducer, scaler
        self._ahead = config.prefetch if config.prefetch is not None else 1
        self._training, self._evaluation, self._backward = Order(), Order(), Order()
        self._forward = self._evaluation
        self._in_backward: list[Unit] = []
        """Units whose backward has begun and is not known to be over."""
        self._recomputed: list[Unit] = []
        """Units gathered by the recomputation that ran last, whose own backward has not begun."""
        self._recomputing = False
        self._backward_running = False
        self._turning: set[Unit] = set()
        """Units gathered in forward because backward begins with them."""
        self._open: list[Unit] = []
        """Units whose forward is running, outermost first."""
        self._called: set[Unit] = set()
        self._blind: set[Unit] = set()
        """Units of whose outputs autograd shows nothing; held until backward has ended."""
        self._differentiable = False
        """A backward with create_graph has run: what it needs will be needed once more, at no foreseeable time."""
        self._attributes = {unit: LeftInAttributes(unit.module.modules()) for unit in units[1:]}
        self._before_backward_hooks = {unit: Hook(partial(self._before_backward, unit)) for unit in units}
        self._before_model_backward_hook = Hook(self._before_model_backward)
        self._register(model)

    def kept(self, unit: Unit) -> bool:
        """Whether a unit is held from forward to backward."""
        if self._config.keep is not None:
            return unit.name in self._config.keep or unit.title in self._config.keep
        return unit is self._root or (bool(self._training.last) and unit is self._training.last[-1])

    def prepare_forward(self, outdated: Set[Flat]) -> None:
        """Gathers what the next forward begins with, as far as it is updated, under the update of the rest."""
        if self._sharded and self._training.last:
            for unit in (self._root, *self._training.last[: self._ahead]):
                if not outdated.isdisjoint(unit.flats) or any(flat.home.asynchronous for flat in unit.flats):
                    return
                unit.gather()

    def forget_calls(self) -> None:
        """After a step: which units were called is asked anew."""
        self._called.clear()
        self._differentiable = False

    # -- registration ---------------------------------------------------------------------------------------------

    def _register(self, model: nn.Module) -> None:
        def forward_hooks(module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
            module.register_forward_pre_hook(Hook(before), prepend=True, with_kwargs=True)
            module.register_forward_hook(Hook(after))

        for unit in self._units[1:]:
            forward_hooks(unit.module, partial(self._before_unit, unit), partial(self._after_unit, unit))
        forward_hooks(model, self._before_model, self._after_model)
        for module in self._owners_of_root(model):
            module.register_forward_pre_hook(Hook(self._before_owner))
        for unit in self._units:
            for flat in unit.trainable_flats:
                for index, parameter in enumerate(flat.parameters):
                    mine = weakref.ref(self)
                    parameter.register_hook(partial(_announce_gradient, mine))
                    hook = partial(_pass_gradient_on, mine, weakref.ref(unit), weakref.ref(flat), index)
                    parameter.register_post_accumulate_grad_hook(hook)

    def _owners_of_root(self, model: nn.Module) -> list[nn.Module]:
        """Modules that need the root and may be called without the model's ``forward``, say by its ``encode``."""
        if not self._published_late:
            return []
        members = {id(parameter) for flat in self._root.flats for parameter in flat.parameters}
        return [
            module
            for module in model.modules()
            if module is not model and any(id(p) in members for p in module.parameters(recurse=False))
        ]

    # -- forward --------------------------------------------------------------------------------------------------

    def _before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not compat.in_backward():
            self._begin_forward()
        self._make_present(self._root, [])
        dtype = self._config.precision.parameters
        if self._scaler is not None and torch.is_grad_enabled():
            args, kwargs = map_tensors(self._unscale_at, args), map_tensors(self._unscale_at, kwargs)
        if dtype is not None and self._config.precision.cast_inputs:
            args, kwargs = cast_floating(args, dtype), cast_floating(kwargs, dtype)
        return args, kwargs

    def _unscale_at(self, tensor: Tensor) -> Tensor:
        """The loss scale ends where the model does: what came before it gets its gradients unscaled."""
        if not tensor.requires_grad:
            return tensor
        alias = tensor.view_as(tensor)
        alias.register_hook(Hook(self._unscale))
        return alias

    def _unscale(self, gradient: Tensor) -> Tensor:
        assert self._scaler is not None
        return gradient / self._scaler.scale

    def _begin_forward(self) -> None:
        if self._backward_running:  # a backward that raised: its gradients are worth nothing
            warnings.warn(
                "the last backward did not finish: its gradients, and all others since the last step, are discarded",
                stacklevel=2,
            )
            self._backward_running = False
            self._in_backward.clear()
            self._recomputed.clear()
            self._reducer.clear()
            for unit in self._units:
                unit.release()
        for flat in self._frozen_flats:
            for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True):
                if parameter.requires_grad:
                    raise RuntimeError(
                        f"parameter {slot.name!r} was frozen when the model was sharded, so it has no gradient and no "
                        "optimizer state; unfreeze it before zeroshard.shard()"
                    )
        hide_all(self._reducer.gradients)
        self._reducer.show()
        if not any(any(gradient.used) for gradient in self._reducer.gradients):
            self._faults.begin()
        self._open.clear()
        self._turning.clear()
        # Asked once, at the model: a block under reentrant checkpointing runs its first forward without gradients.
        self._forward = self._training if torch.is_grad_enabled() else self._evaluation
        self._forward.begin()

    def _before_owner(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._make_present(self._root, [])

    def _before_unit(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if compat.in_backward():
            self._enter_recomputation(unit)
        else:
            self._open.append(unit)
            following = self._forward.enter(unit, self._ahead)
            if self._sharded and self._forward is self._training and self._forward.at_end:
                following = self._first_in_backward(after=unit)
                self._turning.update(following)
            self._make_present(unit, following)

    def _first_in_backward(self, after: Unit) -> list[Unit]:
        """What backward will gather first, but for the units that are present now and may not be kept."""
        present = (self._root, after)
        return [unit for unit in self._backward.last if unit not in present and not self.kept(unit)][: self._ahead]

    def _after_unit(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        blind = False
        if not compat.in_backward() and unit in self._open:
            self._open.remove(unit)
            self._faults.look_at(unit, output)
            trace.phase(f"forward {self._root.title}")
        if torch.is_grad_enabled():
            hook = self._before_backward_hooks[unit]
            if self._open:  # called inside another unit, whose backward goes on around this one's
                hook = Hook(partial(self._before_backward, unit, enclosing=tuple(self._open)))
            found = hook_outputs(output, hook, "unit")
            if self._sharded:  # a loss that a module leaves in an attribute, as mixtures of experts do
                found += hook_outputs(self._attributes[unit].values(), hook, "unit")
            blind = not found and bool(unit.trainable_flats)  # nothing will tell when its backward begins
            if blind:
                self._blind.add(unit)
        if self._sharded and not compat.in_backward() and not blind and not self._held_for_backward(unit):
            self._release(unit)

    def _after_model(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not compat.in_backward():
            trace.phase(f"loss of {type(model).__name__}")
            self._faults.look_at(self._root, output)
            self._gather_what_others_wait_for()
            self._forward.end()
            if self._forward is self._training:
                self._reducer.propose_order([self._root, *self._training.last])
            for unit in self._units:  # also those that were foreseen and not called
                if not self._held_for_backward(unit) and unit not in self._blind and unit not in self._turning:
                    self._release(unit)
        if self._config.precision.output is not None:
            output = cast_floating(output, self._config.precision.output)
        if torch.is_grad_enabled():
            if self._scaler is not None:
                # Aliases on which nothing in the model depends: an output that comes from another is scaled once.
                output = map_tensors(
                    lambda tensor: tensor if tensor.grad_fn is None else tensor.view_as(tensor), output
                )
            hook_outputs(output, self._before_model_backward_hook, "model")
        return output

    def _gather_what_others_wait_for(self) -> None:
        """Of flats that the host has updated and this rank did not call.

        A rank that did waits for us, and we, in backward, for its gradients.
        """
        for flat in self._reducer.publishing_order():
            if flat.updating and flat.gathers_from_others:
                flat.gather()

    def _release(self, unit: Unit) -> None:
        if not self._differentiable:
            unit.release()

    def _held_for_backward(self, unit: Unit) -> bool:
        return self._forward is self._training and self.kept(unit)

    def _make_present(self, unit: Unit, next_units: list[Unit], way: str = "forward") -> None:
        self._called.add(unit)
        trace.phase(None)
        unit.gather()
        for following in next_units:
            following.prefetch()
        unit.wait()
        trace.phase(f"{way} {unit.title}")

    # -- backward -------------------------------------------------------------------------------------------------

    def _before_model_backward(self, gradient: Tensor) -> Tensor | None:
        self.begin_backward()
        self._enter_backward(self._root)
        return gradient * self._scaler.scale if self._scaler is not None else None

    def _before_backward(self, unit: Unit, gradient: Tensor, enclosing: tuple[Unit, ...] = ()) -> None:
        self.begin_backward()
        self._recomputing = False
        if unit in self._recomputed:
            self._recomputed.remove(unit)
        self._enter_backward(unit)
        for other in self._in_backward:
            if other is not unit and other is not self._root and other not in enclosing:
                self._release(other)
                with _no_graph():
                    self._reducer.passed(other)
        self._in_backward = [unit, *enclosing]

    def _enter_recomputation(self, unit: Unit) -> None:
        """The forward of a unit inside backward. Its parameters stay until its own backward, which comes next.

        Its backward has not begun, so that the backward of another is no sign that it is over.
        """
        if not self._recomputing:  # another part of the model: what the last one left is not needed any more
            for other in self._recomputed:
                self._release(other)
            self._recomputed.clear()
            self._recomputing = True
        if unit not in self._in_backward and unit not in self._recomputed:
            self._recomputed.append(unit)
        self._gather_in_backward(unit)

    def begin_backward(self) -> None:
        if torch.is_grad_enabled():  # in hooks, exactly if the backward itself is to be differentiated
            self._differentiable = True
        if not self._backward_running:
            self._backward_running = True
            self._faults.begin_backward()
            self._gather_what_others_wait_for()
            self._backward.begin()
            self._reducer.begin_backward()
            compat.after_backward(self._end_backward)

    def _enter_backward(self, unit: Unit) -> None:
        if unit not in self._in_backward:
            self._in_backward.append(unit)
        self._gather_in_backward(unit)

    def _gather_in_backward(self, unit: Unit) -> None:
        if self._sharded:
            self._make_present(unit, self._backward.enter(unit, self._ahead), "backward")
        else:
            trace.phase(f"backward {unit.title}")

    def on_gradient(self, unit: Unit, flat: Flat, index: int, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            return
        self.begin_backward()
        with _no_graph():
            self._take_gradient(unit, flat, index, parameter, parameter.grad)

    def _take_gradient(
        self, unit: Unit, flat: Flat, index: int, parameter: nn.Parameter, from_autograd: Tensor
    ) -> None:
        gradient = parallel.local_gradient(parameter, from_autograd)
        # Where a unit was called and its gradient comes when it is gone again, the value was there when it was read:
        # autocast, say, had cast the parameter in an earlier forward. A NaN tells; so rare that looking costs nothing.
        uncalled = self._sharded and unit not in self._called
        absent = not flat.present
        if uncalled or (absent and (not self._sharded or bool(gradient.isnan().any()))):
            flat.home.check_not_updated()  # by an earlier gradient of this backward
            raise RuntimeError(
                f"parameter {flat.layout.slots[index].name!r} was used without a call of {unit.title!r}, the module "
                "it is gathered for, so its value was not there; call that module's forward, or choose units= so that "
                "the module that uses the parameter is a unit"
            )
        parameter.grad = None
        buffers = flat.gradient
        buffers.add(index, gradient.detach())
        if buffers.complete:
            self._reducer.completed(flat)

    def _end_backward(self) -> None:
        if not self._backward_running:
            return
        trace.phase(None)
        with compat.label("zeroshard.end_backward"):
            self._backward_running = False
            self._backward.end()
            self._in_backward.clear()
            self._recomputed.clear()
            self._recomputing = False
            self._blind.clear()
            if not torch.is_grad_enabled():
                self._differentiable = False
            for unit in self._units:
                self._release(unit)
            with torch.no_grad():
                self._reducer.end_backward()


_NOTHING: AbstractContextManager[None] = nullcontext()


def _no_graph() -> AbstractContextManager[None]:
    """``torch.no_grad()``, which costs more than most hooks, where a backward does not run without graph anyway."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def _announce_gradient(schedule: weakref.ref[Schedule], gradient: Tensor) -> None:
    """Before autograd adds to ``parameter.grad``: a backward that began at no output of the model is noticed here."""
    listener = schedule()
    if listener is not None:
        listener.begin_backward()


def _pass_gradient_on(
    schedule: weakref.ref[Schedule],
    unit: weakref.ref[Unit],
    flat: weakref.ref[Flat],
    index: int,
    parameter: nn.Parameter,
) -> None:
    """The garbage collector does not see what a parameter's hook holds, so it must hold nothing of the model."""
    listener, its_unit, its_flat = schedule(), unit(), flat()
    if listener is not None and its_unit is not None and its_flat is not None:
        listener.on_gradient(its_unit, its_flat, index, parameter)
