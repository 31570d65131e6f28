"""The sharded torch optimizer: the user's own optimizer, run on the pieces of parameters that this rank updates.

A step has four phases: agree on the averaged gradients; find norm and scale; update unit by unit, in the order in
which the next forward needs them; publish each unit as it is done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from ..comm.fabric import Fabric
from ..states.flat import Flat
from ..states.gradient import read_user_changes
from ..states.updates import Updates
from ..system import compat, trace
from .device_updates import DeviceUpdates
from .foreign import TrainedParameters, step_freely
from .piece_states import PieceStates
from .treatment import Treatment


class Passes(Protocol):
    """What a step asks of the forward and backward passes around it."""

    @property
    def order(self) -> list[Flat]:
        """Trainable flats in the reverse of the order in which the next forward needs them."""

    def check_ready(self, doing: str) -> None:
        """Raises while a ``gathered`` block shows parameters, or while the states sleep in host memory."""

    def check_awake(self, doing: str) -> None:
        """Raises while the states sleep in host memory."""

    def check_structure(self) -> None:
        """Raises if parameters were added or replaced since ``shard()``."""

    def agree(self, purpose: str) -> None:
        """Brings all ranks to the same averaged gradients. Raises if another rank has another purpose."""

    def begin_step(self) -> None:
        """Called after the agreement, before anything is updated."""

    def updated(self, outdated: Set[Flat]) -> None:
        """Called after each batch of updates, with the flats that are still to be updated."""

    def end_step(self) -> None:
        """Called when all updates are made or under way."""

    def failed(self, error: Exception) -> None:
        """Called with the error that a step raised."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Takes the place of the optimizer given to ``shard()``: same groups, same settings, same loop."""

    def __init__(
        self,
        original: torch.optim.Optimizer,
        flats: list[Flat],
        fabric: Fabric,
        *,
        passes: Passes,
        treatment: Treatment,
        elsewhere: Sequence[Updates] = (),
    ) -> None:
        """``elsewhere`` are the updates that are not made on the device."""
        self._flats, self._passes, self._treatment = flats, passes, treatment
        self._during = fabric.watchdog.during
        self.steps = 0
        self.skipped_steps = 0
        """Steps left out because fp16 gradients overflowed, or because of ``on_nonfinite``."""
        self._complete = False
        super().__init__(original.param_groups, original.defaults)
        # The list of groups and its dicts are shared with the original, so schedulers of either optimizer work here.
        self.param_groups = original.param_groups
        compat.adopt_step_hooks(self, original)
        self.unsharded = original
        """The optimizer that was given to ``shard()``."""
        on_device = DeviceUpdates(original, flats, fabric)
        self._updates: list[Updates] = [*elsewhere, on_device]
        for updates in self._updates:
            updates.steered_by = self
        self._state = on_device.state
        self.piece_states = PieceStates(self._state, flats, self._updates, fabric)
        """The optimizer's states, by piece."""
        self.piece_states.take_over(original)
        self._complete = True
        step_freely(self)
        self._trained = TrainedParameters(flats, self)  # the list of all models' is weak, so this keeps it
        original.register_step_pre_hook(_refuse_old_handle)
        original.register_state_dict_pre_hook(_refuse_old_handle)
        original.register_load_state_dict_pre_hook(_refuse_old_handle)

    # -- the user's side ------------------------------------------------------------------------------------------

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Any]]:
        """The optimizer's states, by piece. Waits for updates under way."""
        return self.piece_states.settled() if self._complete else self._state

    @state.setter
    def state(self, value: defaultdict[Tensor, dict[str, Any]]) -> None:
        if getattr(self, "_complete", False):
            raise RuntimeError("the state of a sharded optimizer cannot be assigned; use load_state_dict()")
        self._state = value  # torch's constructor sets an empty state

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates this rank's pieces and publishes them. The gradients are consumed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            with self._during("step()"):
                self._step()
        except Exception as error:
            self._passes.failed(error)
            raise
        return loss

    def _step(self) -> None:
        self._passes.check_ready("step()")
        self._passes.check_structure()
        for updates in self._updates:
            updates.before_step()
        for flat in self._flats:
            flat.writes.check()
        self._treatment.faults.check_not_stopped()
        self._passes.agree("step()")
        self._treatment.check()
        self._passes.begin_step()
        self.steps += 1
        order = self._passes.order
        trace.phase("norm, clipping")
        applied = self._treatment.apply(self.steps, order)
        trace.phase(None)
        if applied:
            outdated = set(self._flats)
            for updates in self._updates:
                for updated in updates.update(order, self.steps):
                    outdated.difference_update(updated)
                    self._passes.updated(outdated)
        else:
            self.skipped_steps += 1
            for updates in self._updates:
                updates.skip()
        compat.mark_stepped(self.unsharded)
        self._passes.end_step()
        self._treatment.faults.act()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. All parameters in one call: one by one, absent parameters take longer to answer."""
        if set_to_none:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            compat.set_grads(parameters, [None] * len(parameters))
        else:
            super().zero_grad(set_to_none=False)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients of the coming ``step()`` to a global norm of at most ``max_norm``.

        Call it on all ranks between backward and ``step()``; returns the norm before clipping.
        """
        with self._during("clip_grad_norm_()"):
            self._passes.check_awake("clip_grad_norm_()")
            self._passes.agree("clip_grad_norm_()")
            norm = self._treatment.clip(max_norm)
        for flat in self._flats:
            flat.gradient.rescaled()
        return norm

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """``torch.amp.GradScaler.step`` asks this first. Refuses a second loss scale."""
        if self._treatment.scaler is not None:
            raise RuntimeError(
                'precision="fp16" scales the loss itself, so a GradScaler would scale it twice; leave the scaler out, '
                "or create it with enabled=False"
            )
        return False

    @property
    def grad_norm(self) -> Tensor | None:
        """Global gradient norm before clipping, of the last step that computed it; on the device."""
        return self._treatment.grad_norm

    def finish_updates(self) -> None:
        """Waits for updates under way, and publishes delayed ones."""
        for updates in self._updates:
            updates.finish()

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's format, on the CPU of every rank. Collective: call it on all ranks."""
        with self._during("optimizer.state_dict()"):
            self._passes.check_awake("optimizer.state_dict()")
            return self.piece_states.state_dict(self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a whole state, as ``state_dict()`` or the unsharded optimizer gave it. Collective."""
        with self._during("optimizer.load_state_dict()"):
            self._passes.check_awake("optimizer.load_state_dict()")
            self.piece_states.load_state_dict(self.param_groups, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._complete:
            raise RuntimeError(
                "parameters cannot be added to a sharded optimizer; add the group before zeroshard.shard()"
            )
        super().add_param_group(param_group)

    def gradients_came(self) -> None:
        """Called once for every new set of averaged gradients."""
        self._treatment.begin()

    # -- for checkpoints ------------------------------------------------------------------------------------------

    def settle(self, what: str) -> None:
        """Waits until nothing is under way. Raises if gradients wait for their step: they would be lost."""
        for updates in self._updates:
            updates.settle()
        self.piece_states.settled()
        gradients = [flat.gradient for flat in self._flats]
        read_user_changes(gradients)  # zero_grad() may have dropped gradients
        for gradient in gradients:
            if any(gradient.used):
                raise RuntimeError(
                    f"{what} between backward() and step(): the gradients of {gradient.label!r} would be lost; call it "
                    "after step(), or drop them first with zero_grad()"
                )

    def progress(self) -> dict[str, Any]:
        """Counts, and other facts apart from states, that the next step needs from the last one."""
        scaler = self._treatment.scaler
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "loss_scale": None if scaler is None else scaler.state(),
            "host": next((found for updates in self._updates if (found := updates.progress()) is not None), None),
        }

    def load_progress(self, progress: dict[str, Any]) -> None:
        """Takes what ``progress`` returned when a checkpoint was saved. Ignores facts that this run does not need."""
        self.steps, self.skipped_steps = int(progress["steps"]), int(progress["skipped_steps"])
        scaler = self._treatment.scaler
        if scaler is not None and progress["loss_scale"] is not None:
            scaler.load(progress["loss_scale"])
        if progress["host"] is not None:
            for updates in self._updates:
                updates.load_progress(progress["host"])

    def states_loaded(self) -> None:
        """Called when a checkpoint was loaded."""
        self._treatment.check_equal = True


def _refuse_old_handle(optimizer: torch.optim.Optimizer, *_: object) -> None:
    raise RuntimeError(
        "this optimizer was given to zeroshard.shard() and no longer trains anything; call step() on the optimizer "
        "that shard() returned"
    )
