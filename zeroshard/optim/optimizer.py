"""The sharded torch optimizer: the user's own optimizer, run on the pieces of parameters that this rank keeps.

A step has four phases: agree on the averaged gradients; find norm and scale; update unit by unit, in the order in
which the next forward needs them; publish each unit as it is done.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Set
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from ..comm.fabric import Fabric
from ..config.bounds import FIRST_ELEMENTS, UPDATE_ELEMENTS
from ..config.options import Config
from ..offload.pipeline import Pipeline
from ..states.flat import Flat, MasterPiece, gradient_of
from ..system import compat
from .hosted import HostUpdate, missing_gradient
from .loss_scale import LossScaler
from .nonfinite import Faults
from .norm import check_replicas_agree, clip_factor, global_norm
from .piece_states import PieceStates


class Passes(Protocol):
    """What a step asks of the forward and backward passes around it."""

    @property
    def order(self) -> list[Flat]:
        """Trainable flats in the order in which backward reduces them."""

    def check_no_block_open(self, doing: str) -> None:
        """Raises while a ``gathered`` block shows parameters."""

    def agree(self) -> bool:
        """Brings all ranks to the same averaged gradients; False if they had agreed already."""

    def begin_step(self) -> None:
        """Called after the agreement, before anything is updated."""

    def updated(self, outdated: Set[Flat]) -> None:
        """Called after each batch of updates, with the flats that are still to be updated."""

    def end_step(self) -> None:
        """Called when all updates are made or under way."""

    def failed(self, error: Exception) -> None:
        """Called with what a step raised."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Takes the place of the optimizer given to ``shard()``: same groups, same settings, same loop."""

    def __init__(
        self,
        original: torch.optim.Optimizer,
        flats: list[Flat],
        *,
        config: Config,
        fabric: Fabric,
        passes: Passes,
        scaler: LossScaler | None,
        pipeline: Pipeline | None,
        faults: Faults,
    ) -> None:
        self._fabric, self._passes, self._scaler = fabric, passes, scaler
        self._max_norm = config.clip_grad_norm
        self._faults = faults
        self._flats = flats
        self._clipped = False
        self.grad_norm: Tensor | None = None
        """Global gradient norm before clipping, of the last step that computed it; on the device."""
        self.steps = 0
        self.skipped_steps = 0
        """Steps left out because fp16 gradients overflowed, or because of ``on_nonfinite``."""
        self.check_replicas = True
        """Compare, in the coming step, the gradients of what every tensor-parallel rank has whole."""
        self._complete = False
        super().__init__(original.param_groups, original.defaults)
        # The list and the dicts in it are the original's, so schedulers built on either handle steer this one.
        self.param_groups = original.param_groups
        compat.adopt_step_hooks(self, original)
        self._original = original
        self._groups = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}
        self._inner = self._on_pieces(original)
        self._state = self._inner.state
        self._host: HostUpdate | None = None
        if pipeline is not None:
            self._host = HostUpdate(
                flats, pipeline, original, fabric.rank, self._group, self._state, passes.check_no_block_open
            )
        self.piece_states = PieceStates(
            self._state, flats, kind=type(original), host=self._host, fabric=fabric, group_of=self._group
        )
        """What it keeps, by piece."""
        self.piece_states.take_over(original)
        self._complete = True
        original.register_step_pre_hook(_refuse_old_handle)
        original.register_state_dict_pre_hook(_refuse_old_handle)
        original.register_load_state_dict_pre_hook(_refuse_old_handle)

    # -- the user's side ------------------------------------------------------------------------------------------

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Any]]:
        """By piece, what the optimizer keeps. Waits for updates on the host."""
        return self.piece_states.settled() if self._complete else self._state

    @state.setter
    def state(self, value: defaultdict[Tensor, dict[str, Any]]) -> None:
        if getattr(self, "_complete", False):
            raise RuntimeError("the state of a sharded optimizer cannot be assigned; use load_state_dict()")
        self._state = value  # torch sets an empty one, before there is anything to wait for

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
            self._step()
        except Exception as error:
            self._passes.failed(error)
            raise
        return loss

    def _step(self) -> None:
        self._passes.check_no_block_open("step()")
        if self._host is not None:
            self._host.finish()
        for flat in self._flats:
            flat.check_unwritten()
        self._faults.check_not_stopped()
        self._agree()
        if self.check_replicas:
            check_replicas_agree(self._flats, self._fabric)
            self.check_replicas = False
        self._passes.begin_step()
        self.steps += 1
        if self._prepare_gradients():
            if self._host is not None:
                self._host.update(self._passes.order, self.steps)
            outdated = set(self._flats)
            for batch in self._batches():
                self._update(batch)
                outdated.difference_update(batch)
                self._passes.updated(outdated)
        else:
            self.skipped_steps += 1
            if self._host is not None:
                self._host.publish_held()  # which belongs to the step before
        compat.mark_stepped(self._original)
        self._passes.end_step()
        self._faults.act()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients of the coming ``step()`` to a global norm of at most ``max_norm``.

        Call it on all ranks between backward and ``step()``; returns the norm before clipping.
        """
        self._agree()
        norm = self._norm()
        self._scale(clip_factor(norm, max_norm))
        self._clipped = True
        for flat in self._flats:
            gradient_of(flat).show()
        return norm

    def finish_host(self) -> None:
        """Waits for updates on the host, and publishes what a delayed one has made."""
        if self._host is not None:
            self._host.publish_held()
            self._host.pipeline.wait()

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's format, on the CPU of every rank. Collective: call it on all ranks."""
        return self.piece_states.state_dict(self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a whole state, as ``state_dict()`` or the unsharded optimizer gave it. Collective."""
        self.piece_states.load_state_dict(self.param_groups, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._complete:
            raise RuntimeError(
                "parameters cannot be added to a sharded optimizer; add the group before zeroshard.shard()"
            )
        super().add_param_group(param_group)

    # -- update ---------------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        with compat.label("zeroshard.agree"):
            if self._passes.agree():
                self._clipped = False

    def _prepare_gradients(self) -> bool:
        """Clips and unscales, which waits for the device only with loss scaling; False if they overflowed."""
        if self._max_norm is None and self._scaler is None and not self._faults.watching:
            return True
        norm = self._norm()
        if self._faults.watching:
            curable = self._scaler is not None and self._scaler.can_be_lowered
            if self._faults.found(self.steps, norm, self._passes.order, curable):
                return False
        factor: Tensor | None = None
        if self._scaler is not None:
            scale = self._scaler.scale
            overflowed = not compat.is_fake(norm) and not math.isfinite(float(norm))
            self._scaler.update(overflowed)
            if overflowed:
                return False
            factor = torch.tensor(1.0 / scale, dtype=torch.float32, device=self._fabric.device)
        if self._max_norm is not None:
            clipping = clip_factor(norm, self._max_norm)
            factor = clipping if factor is None else factor * clipping
        if factor is not None:
            self._scale(factor)
        return True

    def _norm(self) -> Tensor:
        with compat.label("zeroshard.optim.norm"):
            norm = global_norm(self._flats, self._fabric)
            if self._scaler is not None:
                norm = norm / self._scaler.scale
            if not self._clipped:
                self.grad_norm = norm
            return norm

    def _scale(self, factor: Tensor) -> None:
        for flat in self._flats:
            gradient_of(flat).scale(factor)

    def _batches(self) -> Iterator[list[Flat]]:
        """Flats to update together, in the order in which the next forward needs them.

        One call of the optimizer for many small flats saves launches; its gradients in the master's dtype exist only
        during the call, so a batch is bounded (C_B).
        """
        batch: list[Flat] = []
        elements, enough = 0, FIRST_ELEMENTS
        for flat in reversed(self._passes.order):
            if flat.host is not None:
                continue
            batch.append(flat)
            elements += flat.own.numel
            if elements >= enough:
                yield batch
                batch, elements, enough = [], 0, UPDATE_ELEMENTS
        if batch:
            yield batch

    def _update(self, flats: list[Flat]) -> None:
        pieces: list[list[Tensor]] = [[] for _ in self.param_groups]
        updated = [flat for flat in flats if any(gradient_of(flat).used)]
        with compat.label(f"zeroshard.update {' '.join(flat.label for flat in updated)}"):
            for flat in updated:
                buffers = gradient_of(flat)
                gradient = buffers.take(flat.master_dtype)
                if gradient is None:
                    raise missing_gradient(flat, self._fabric.rank)
                for piece, part in zip(flat.pieces, flat.by_piece(gradient), strict=True):
                    if buffers.used[piece.slot]:
                        piece.tensor.grad = part
                        pieces[self._group_of(flat, piece)].append(piece.tensor)
            self._inner.param_groups = [
                {**group, "params": members} for group, members in zip(self.param_groups, pieces, strict=True)
            ]
            self._inner.step()
            for flat in updated:
                for piece in flat.pieces:
                    piece.tensor.grad = None
        for flat in updated:
            flat.publish()

    def _group_of(self, flat: Flat, piece: MasterPiece) -> int:
        return self._groups[id(flat.parameters[piece.slot])]

    def _group(self, flat: Flat, piece: MasterPiece) -> dict[str, Any]:
        return self.param_groups[self._group_of(flat, piece)]

    def _on_pieces(self, original: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """A second optimizer of the user's class that works on pieces. Attributes of other classes come along."""
        inner = copy.copy(original)
        for name, value in vars(original).items():
            if name != "step":  # a scheduler's wrapper around the old handle
                inner.__dict__.setdefault(name, value)
        inner.param_groups, inner.state = [], defaultdict(dict)
        return inner

    # -- for checkpoints ------------------------------------------------------------------------------------------

    @property
    def unsharded(self) -> torch.optim.Optimizer:
        """The optimizer that was given to ``shard()``."""
        return self._original

    def settle(self, what: str) -> None:
        """Waits for the host. Raises where gradients wait for their step: they would be lost."""
        if self._host is not None:
            self._host.pipeline.settle()
            self._host.show_steps()
        for gradient in map(gradient_of, self._flats):
            gradient.hide()  # which sees what zero_grad() dropped
            gradient.show()
            if any(gradient.used):
                raise RuntimeError(
                    f"{what} between backward() and step(): the gradients of {gradient.label!r} would be lost; call it "
                    "after step(), or drop them first with zero_grad()"
                )

    def progress(self) -> dict[str, Any]:
        """Counts that the next step goes on from."""
        return {
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "loss_scale": None if self._scaler is None else self._scaler.state(),
            "host": None if self._host is None else self._host.progress(),
        }

    def load_progress(self, progress: dict[str, Any]) -> None:
        """Goes on from what ``progress`` gave; what this run has no use for is left."""
        self.steps, self.skipped_steps = int(progress["steps"]), int(progress["skipped_steps"])
        if self._scaler is not None and progress["loss_scale"] is not None:
            self._scaler.load(progress["loss_scale"])
        if self._host is not None and progress["host"] is not None:
            self._host.load_progress(progress["host"])

    @property
    def delays_updates(self) -> bool:
        """Whether the host may hold back what an update has made."""
        return self._host is not None and self._host.delays


def _refuse_old_handle(optimizer: torch.optim.Optimizer, *_: object) -> None:
    raise RuntimeError(
        "this optimizer was given to zeroshard.shard() and no longer trains anything; call step() on the optimizer "
        "that shard() returned"
    )
