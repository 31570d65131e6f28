"""Hooks on the model: they tell when a forward or backward of a unit begins and ends.

Forward hooks tell of calls. Tensor hooks on outputs tell when the backward of a unit begins. Hooks on parameters tell
when a gradient is ready. ``lifetimes`` gathers and releases units accordingly, ``reducer`` reduces gradients.

Nothing here depends on hooks coming in pairs. Recomputation stops early and skips hooks, a module may be called twice,
and an exception can end a pass anywhere.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import parallel
from ..comm.watchdog import BACKWARD, EVALUATION, FORWARD, Watchdog
from ..config.options import Config
from ..config.table import Extent, Place, StateTable
from ..optim.loss_scale import LossScaler
from ..optim.nonfinite import Faults
from ..states.flat import Presence
from ..states.gradient import read_user_changes
from ..states.unit import Unit
from ..system import compat, trace
from ..system.hook import Hook
from .border import Border
from .compiled import Compiled
from .lifetimes import Lifetimes
from .outputs import OF_MODEL, OF_UNIT, AttributeOutputs, hook_outputs
from .reducer import Reducer
from .structure import Structure
from .transforms import Transforms


class _Passing:
    """Which pass of the model runs. The hooks of parameters have it, so it has no reference to the model."""

    backward = False


class Schedule:
    """Drives the units of one model from its hooks."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        structure: Structure,
        *,
        table: StateTable,
        config: Config,
        reducer: Reducer,
        scaler: LossScaler | None,
        faults: Faults,
        watchdog: Watchdog,
    ) -> None:
        self._root, self._units, self._structure = units[0], units, structure
        self._reducer, self._faults, self._watchdog = reducer, faults, watchdog
        self._border = Border(config.precision, scaler)
        self._sharded = table.parameters.extent is Extent.SHARD
        self.lifetimes = Lifetimes(units, config, sharded=self._sharded)
        self._transforms = Transforms(units, self.lifetimes, sharded=self._sharded, scaled=scaler is not None)
        self._compiled = Compiled(model, units)
        self._passing = _Passing()
        self.forwards = 0
        """The number of training forwards until now: with gradients, in training mode."""
        self._running: list[Unit] = []
        """Units whose forward is running, outermost first."""
        self._attributes = {unit: AttributeOutputs(unit.module.modules()) for unit in units[1:]}
        self._members = {
            id(parameter): (unit, flat, flat.gradient, index)
            for unit in units
            for flat in unit.trainable_flats
            for index, parameter in enumerate(flat.parameters)
        }
        """Unit, flat, the flat's gradients and the index in the flat, of each trainable parameter."""
        self._before_backward_hooks = {unit: Hook(partial(self._before_backward, unit)) for unit in units[1:]}
        self._after_hooks = {unit: Hook(partial(self._after_unit, unit)) for unit in units[1:]}
        self._before_model_backward_hook = Hook(self._before_model_backward)
        published_late = table.optimizer.extent is Extent.SHARD or table.optimizer.place is Place.HOST
        self._register(model, _owners_of_root(model, self._root) if published_late else [])

    def _register(self, model: nn.Module, owners_of_root: list[nn.Module]) -> None:
        def forward_hooks(module: nn.Module, before: Callable[..., Any], after: Hook) -> None:
            module.register_forward_pre_hook(Hook(before), prepend=True, with_kwargs=True)
            module.register_forward_hook(after)

        for unit in self._units[1:]:
            forward_hooks(unit.module, partial(self._before_unit, unit), self._after_hooks[unit])
        forward_hooks(model, self._before_model, Hook(self._after_model))
        callers = {unit.module: set(unit.module.modules()) for unit in self._units[1:]}
        owner_callers: dict[nn.Module, None] = {}
        for module in owners_of_root:
            # A hook inside a unit would cut the unit's compiled graph in two, so the unit's own call has it.
            around = [caller for caller, inside in callers.items() if module in inside]
            for caller in around or [module]:
                owner_callers[caller] = None
        for module in owner_callers:
            module.register_forward_pre_hook(Hook(self._before_owner))
        before, after = self._gradient_hooks()
        for flat in self._reducer.flats:
            for parameter in flat.parameters:
                parameter.register_hook(before)
                parameter.register_post_accumulate_grad_hook(after)

    def _gradient_hooks(self) -> tuple[Callable[[Tensor], None], Callable[[Tensor], None]]:
        """Two hooks for every parameter: one runs before autograd adds to ``parameter.grad``, one after.

        They have no reference to the model, because the garbage collector does not look into such hooks.
        """
        this, passing = weakref.ref(self), self._passing

        def before(gradient: Tensor) -> None:
            # A backward past the model's outputs begins here. Enabled gradients mean that it runs with create_graph.
            if (not passing.backward or torch.is_grad_enabled()) and (schedule := this()) is not None:
                schedule.begin_backward()

        def after(parameter: Tensor) -> None:
            schedule = this()
            if parameter.grad is None or schedule is None:
                return
            if not passing.backward:
                schedule.begin_backward()
            if torch.is_grad_enabled():
                with torch.no_grad():
                    schedule.take_gradient(parameter)
            else:  # no_grad() takes its time
                schedule.take_gradient(parameter)

        return before, after

    # -- forward --------------------------------------------------------------------------------------------------

    def _before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if compat.in_transform():
            self._structure.check()
            self._transforms.enter(self._root)
        else:
            if not compat.in_backward():
                self._begin_forward()
                self.forwards += torch.is_grad_enabled() and model.training
            self.lifetimes.require(self._root)
        return self._border.enter(args), self._border.enter(kwargs)

    def _begin_forward(self) -> None:
        self._compiled.look(changed=self._structure.check())
        self._watchdog.begin_pass(FORWARD if torch.is_grad_enabled() else EVALUATION)
        self.discard_failed_backward()
        self._check_still_frozen()
        read_user_changes(self._reducer.gradients)
        if not any(any(gradient.used) for gradient in self._reducer.gradients):
            self._faults.begin()
        self._running.clear()
        self.lifetimes.begin_forward()

    def discard_failed_backward(self) -> None:
        """Forgets all gradients if the last backward raised: nobody can tell which of them are complete."""
        if self._passing.backward and not compat.in_backward():
            warnings.warn(
                "the last backward did not finish: its gradients, and all others since the last step, are discarded",
                stacklevel=2,
            )
            self._passing.backward = False
            self._reducer.clear()
            self.lifetimes.abandon_backward()

    def _check_still_frozen(self) -> None:
        with compat.plain():  # absent parameters would take longer to answer
            self._check_frozen_flats()

    def _check_frozen_flats(self) -> None:
        for flat in (flat for unit in self._units for flat in unit.flats if not flat.trainable):
            for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True):
                if parameter.requires_grad:
                    raise RuntimeError(
                        f"parameter {slot.name!r} was frozen when the model was sharded, so it has no gradient and no "
                        "optimizer state; unfreeze it before zeroshard.shard()"
                    )

    def _before_owner(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if compat.in_transform():
            self._transforms.enter(self._root)
        else:
            self.lifetimes.require(self._root)

    def _before_unit(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if compat.in_transform():
            self._transforms.enter(unit)
        elif compat.in_backward():
            self.lifetimes.enter_recomputation(unit)
        else:
            self._running.append(unit)
            self.lifetimes.enter_forward(unit)

    def _after_unit(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if compat.in_transform():
            self._transforms.leave(unit)
            return
        recomputed = compat.in_backward()
        if not recomputed and unit in self._running:
            self._running.remove(unit)
            self._faults.look_at(unit, output)
            trace.phase("forward", self._root.title)
        if torch.is_grad_enabled() and not self._hook_outputs(unit, output) and unit.trainable_flats:
            self.lifetimes.stay_until_backward_ends(unit)
        elif not recomputed and compat.is_last_forward_hook(module, self._after_hooks[unit]):
            self.lifetimes.leave_forward(unit)
        elif not recomputed:
            self.lifetimes.leave_after_hooks(unit)

    def _hook_outputs(self, unit: Unit, output: Any) -> int:
        """Hooks the tensors that a unit made. Returns how many of them have a ``grad_fn``."""
        hook = self._before_backward_hooks[unit]
        if self._running:  # the unit was called inside other units: their backward goes on when its backward begins
            hook = Hook(partial(self._before_backward, unit, enclosing=tuple(self._running)))
        found = hook_outputs(output, hook, OF_UNIT)
        if self._sharded:  # mixtures of experts, for example, leave a loss in an attribute
            found += hook_outputs(self._attributes[unit].values(), hook, OF_UNIT)
        return found

    def _after_model(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if compat.in_transform():
            self._transforms.leave_model()
            return self._border.leave(output)
        if not compat.in_backward():
            trace.phase(f"loss of {type(model).__name__}")
            self._faults.look_at(self._root, output)
            self._gather_for_others()
            order = self.lifetimes.end_forward()
            if order:
                self._reducer.propose_order(order)
            self._watchdog.end_pass()
        output = self._border.leave(output)
        if torch.is_grad_enabled():
            hook_outputs(output, self._before_model_backward_hook, OF_MODEL)
        return output

    def _gather_for_others(self) -> None:
        """Gathers the flats that the host has updated and this rank did not use.

        A rank that used such a flat waits for our part of it, and in backward we wait for the gradients of that rank.
        """
        for flat in self._reducer.publishing_order():
            if flat.updating and flat.gathers_from_others:
                flat.gather()

    # -- backward -------------------------------------------------------------------------------------------------

    def _before_model_backward(self, gradient: Tensor) -> Tensor | None:
        self.begin_backward()
        self.lifetimes.require_in_backward(self._root)
        return self._border.scale(gradient)

    def _before_backward(self, unit: Unit, gradient: Tensor, enclosing: tuple[Unit, ...] = ()) -> None:
        self.begin_backward()
        for other in self.lifetimes.enter_backward(unit, enclosing):
            with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:  # no_grad() takes its time
                self._reducer.passed(other)

    def begin_backward(self) -> None:
        """Called by every hook that runs in backward. Only the first call of a pass does something."""
        if torch.is_grad_enabled():  # in a hook this means that the backward runs with create_graph
            self.lifetimes.second_backward = True
        if not self._passing.backward:
            self._passing.backward = True
            self._watchdog.begin_pass(BACKWARD)
            self._faults.begin_backward()
            self._gather_for_others()
            self.lifetimes.begin_backward()
            self._reducer.begin_backward()
            compat.after_backward(self._end_backward)

    def take_gradient(self, parameter: Tensor) -> None:
        """Takes ``parameter.grad``, which autograd has just computed, away from the parameter."""
        assert parameter.grad is not None
        gradient = parallel.local_gradient(parameter, parameter.grad)
        unit, flat, buffers, index = self._members[id(parameter)]
        # In stage 3, the unit may be released when the gradient comes. That is right if the values were present when
        # they were read: for example, autocast cast the parameter in an earlier forward. If the values were not
        # present, the gradient is NaN. This case is so rare that the check costs nothing.
        uncalled = self._sharded and unit not in self.lifetimes.called
        absent = flat.presence is not Presence.PRESENT
        if uncalled or (absent and (not self._sharded or bool(gradient.isnan().any()))):
            flat.home.check_not_updated()  # raises if an earlier gradient caused an update
            raise RuntimeError(
                f"parameter {flat.layout.slots[index].name!r} was used without a call of {unit.title!r}, the module "
                "it is gathered for, so its value was not there; call that module's forward, or choose units= so that "
                "the module that uses the parameter is a unit"
            )
        parameter.grad = None
        if buffers.add(index, gradient):
            self._reducer.completed(flat)

    def _end_backward(self) -> None:
        if not self._passing.backward:
            return
        trace.phase(None)
        with compat.label("zeroshard.end_backward"):
            self._passing.backward = False
            self.lifetimes.end_backward()
            with torch.no_grad():
                self._reducer.end_backward()
            self._watchdog.end_pass()


def _owners_of_root(model: nn.Module, root: Unit) -> list[nn.Module]:
    """Modules that use parameters of the root and may be called without the model's ``forward``, say by ``encode``."""
    members = {id(parameter) for flat in root.flats for parameter in flat.parameters}
    return [
        module
        for module in model.modules()
        if module is not model and any(id(p) in members for p in module.parameters(recurse=False))
    ]


_NOTHING: AbstractContextManager[None] = nullcontext()
