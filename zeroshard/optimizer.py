"""The sharded torch optimizer: the user's own optimizer, run on the pieces of parameters that this rank keeps.

A step has four phases: agree on the averaged gradients; find norm and scale; update unit by unit, in the order in
which the next forward needs them; publish each unit as it is done.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import compat, parallel
from .bounds import FIRST_ELEMENTS, UPDATE_ELEMENTS
from .comm import Fabric
from .config import Config
from .hosted import HostUpdate, missing_gradient
from .nonfinite import Faults
from .offload.pipeline import Pipeline
from .precision import LossScaler, check_replicas_agree, clip_factor, global_norm
from .reducer import Reducer, gradient_of
from .schedule import Schedule
from .unit import Flat, MasterPiece

ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Optimizers of torch that update an element from its own value, gradient and state alone."""

SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""State that belongs to a parameter as a whole; where a parameter is itself a scalar its shape does not tell."""

MASTER = "master"
"""Name, in a state dict, of the fp32 value behind a 16-bit parameter."""


def check_elementwise(optimizer: torch.optim.Optimizer, vouched: bool) -> None:
    """Only an optimizer that treats each element by itself gives the same result on shards."""
    kind = type(optimizer)
    if kind in ELEMENTWISE:
        if vouched:
            raise ValueError(f"elementwise=True has no effect: {kind.__name__} is known to be; leave it out")
        return
    if kind.__module__.startswith("torch.optim"):
        raise ValueError(
            f"{kind.__name__} looks at more than one element at a time (a whole matrix, or the whole model), so it "
            f"cannot update shards; use one of {', '.join(sorted(known.__name__ for known in ELEMENTWISE))}"
        )
    if not vouched:
        raise ValueError(
            f"zeroshard does not know whether {kind.__name__} updates each element by itself, which sharding needs; "
            "if it does, say so with elementwise=True"
        )


class ShardedOptimizer(torch.optim.Optimizer):
    """Takes the place of the optimizer given to ``shard()``: same groups, same settings, same loop."""

    def __init__(
        self,
        original: torch.optim.Optimizer,
        flats: list[Flat],
        *,
        config: Config,
        fabric: Fabric,
        reducer: Reducer,
        schedule: Schedule,
        scaler: LossScaler | None,
        pipeline: Pipeline | None,
        faults: Faults,
        before_step: Callable[[], None],
        after_step: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._fabric, self._reducer, self._schedule, self._scaler = fabric, reducer, schedule, scaler
        self._max_norm = config.clip_grad_norm
        self._faults = faults
        self._flats = flats
        self._before_step, self._after_step, self._on_error = before_step, after_step, on_error
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
                flats, pipeline, original, fabric.rank, self._group, self._state, schedule.check_nothing_held
            )
        self._shard_state(original)
        self._complete = True
        original.register_step_pre_hook(_refuse_old_handle)
        original.register_state_dict_pre_hook(_refuse_old_handle)
        original.register_load_state_dict_pre_hook(_refuse_old_handle)

    # -- the user's side ------------------------------------------------------------------------------------------

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Any]]:
        """By piece, what the optimizer keeps. Waits for updates on the host."""
        if self._host is not None:
            self._host.pipeline.wait()
            self._host.show_steps()
        return self._state

    @state.setter
    def state(self, value: defaultdict[Tensor, dict[str, Any]]) -> None:
        if getattr(self, "_complete", False):
            raise RuntimeError("the state of a sharded optimizer cannot be assigned; use load_state_dict()")
        self._state = value
        self._host = None  # torch sets an empty one, before there is anything to wait for

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
            self._on_error(error)
            raise
        return loss

    def _step(self) -> None:
        self._schedule.check_nothing_held("step()")
        if self._host is not None:
            self._host.finish()
        for flat in self._flats:
            flat.check_unwritten()
        self._faults.check_not_stopped()
        self._agree()
        if self.check_replicas:
            check_replicas_agree(self._reducer.flats, self._fabric)
            self.check_replicas = False
        self._before_step()
        self.steps += 1
        if self._prepare_gradients():
            if self._host is not None:
                self._host.update(self._reducer.order, self.steps)
            outdated = set(self._flats)
            for batch in self._batches():
                self._update(batch)
                outdated.difference_update(batch)
                self._schedule.prepare_forward(outdated)
        else:
            self.skipped_steps += 1
            if self._host is not None:
                self._host.publish_held()  # which belongs to the step before
        self._reducer.clear()
        self._schedule.forget_calls()
        compat.mark_stepped(self._original)
        self._after_step()
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
        self._reducer.show()
        return norm

    def finish_host(self) -> None:
        """Waits for updates on the host, and publishes what a delayed one has made."""
        if self._host is not None:
            self._host.publish_held()
            self._host.pipeline.wait()

    def device_tensors(self) -> list[Tensor]:
        """The states that live on the device, for the memory ledger."""
        on_host = set() if self._host is None else {piece.tensor for f in self._host.flats for piece in f.pieces}
        states = [state for piece, state in self._state.items() if piece not in on_host]
        return [value for state in states for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._complete:
            raise RuntimeError(
                "parameters cannot be added to a sharded optimizer; add the group before zeroshard.shard()"
            )
        super().add_param_group(param_group)

    # -- update ---------------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        with compat.label("zeroshard.agree"):
            if self._reducer.agree():
                self._clipped = False

    def _prepare_gradients(self) -> bool:
        """Clips and unscales, which waits for the device only with loss scaling; False if they overflowed."""
        if self._max_norm is None and self._scaler is None and not self._faults.watching:
            return True
        norm = self._norm()
        if self._faults.watching:
            curable = self._scaler is not None and self._scaler.can_be_lowered
            if self._faults.found(self.steps, norm, self._reducer.order, curable):
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
        with compat.label("zeroshard.norm"):
            norm = global_norm(self._reducer.flats, self._fabric)
            if self._scaler is not None:
                norm = norm / self._scaler.scale
            if not self._clipped:
                self.grad_norm = norm
            return norm

    def _scale(self, factor: Tensor) -> None:
        for gradient in self._reducer.gradients:
            gradient.scale(factor)

    def _batches(self) -> Iterator[list[Flat]]:
        """Flats to update together, in the order in which the next forward needs them.

        One call of the optimizer for many small flats saves launches; its gradients in the master's dtype exist only
        during the call, so a batch is bounded (C_B).
        """
        batch: list[Flat] = []
        elements, enough = 0, FIRST_ELEMENTS
        for flat in reversed(self._reducer.order):
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
                for piece in flat.pieces:
                    if buffers.used[piece.slot]:
                        piece.tensor.grad = gradient[piece.offset :][: piece.tensor.numel()]
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

    def _shard_state(self, original: torch.optim.Optimizer) -> None:
        """Cuts state that the optimizer already has into pieces."""
        for flat in self._flats:
            for piece in flat.pieces:
                parameter = flat.parameters[piece.slot]
                if parameter in original.state:
                    self._load_piece(flat, piece, _with_whole_tensors(original.state[parameter]))
        original.state.clear()

    def _load_piece(self, flat: Flat, piece: MasterPiece, state: dict[str, Any]) -> None:
        if self._host is not None and flat.host is not None:
            self._host.load(flat, piece, state)
            return
        slot = flat.layout.slots[piece.slot]
        loaded = {}
        for name, value in state.items():
            if name == MASTER:
                if flat.separate_master:
                    piece.tensor.copy_(slot.part(value).reshape(-1)[piece.start :][: piece.tensor.numel()])
            elif isinstance(value, Tensor) and value.shape == slot.whole_shape and name not in SCALARS:
                part = slot.part(value).reshape(-1)[piece.start :][: piece.tensor.numel()]
                loaded[name] = part.to(device=piece.tensor.device, dtype=piece.tensor.dtype, copy=True)
            elif isinstance(value, Tensor):
                group = self.param_groups[self._group_of(flat, piece)]
                on_device = group.get("fused") or group.get("capturable")  # where torch keeps it, too
                loaded[name] = value.to(piece.tensor.device, copy=True) if on_device else value.clone()
            else:
                loaded[name] = copy.deepcopy(value)
        self._state[piece.tensor] = loaded

    # -- state dict -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's format, on the CPU of every rank. Collective: call it on all ranks."""
        numbers = {id(p): n for n, p in enumerate(p for group in self.param_groups for p in group["params"])}
        packed: dict[int, dict[str, Any]] = {}
        for flat in self._flats:
            for index, state in self._whole_states(flat).items():
                packed[numbers[id(flat.parameters[index])]] = state
        start, groups = 0, []
        for group in self.param_groups:
            members = range(start, start + len(group["params"]))
            groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": list(members)})
            start = members.stop
        return {"state": dict(sorted(packed.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a whole state, as ``state_dict()`` or the unsharded optimizer gave it."""
        groups = state_dict["param_groups"]
        ours = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in groups] != ours:
            raise ValueError(
                f"the state dict has groups of {[len(group['params']) for group in groups]} parameters, the optimizer "
                f"{ours}; build it with the same groups"
            )
        for mine, theirs in zip(self.param_groups, groups, strict=True):
            mine.update({key: copy.deepcopy(value) for key, value in theirs.items() if key != "params"})
        order = [key for group in groups for key in group["params"]]
        members = [p for group in self.param_groups for p in group["params"]]
        states = {id(p): state_dict["state"].get(key) for key, p in zip(order, members, strict=True)}
        if self._host is not None:
            self._host.forget_states()
        self._state.clear()
        with torch.no_grad():
            for flat in self._flats:
                loaded = False
                for piece in flat.pieces:
                    state = states[id(flat.parameters[piece.slot])]
                    if state is not None:
                        self._load_piece(flat, piece, state)
                        loaded = loaded or MASTER in state
                if flat.host is not None and loaded:
                    flat.host.adopt(self._with_masters(flat, states))
                if self._agree_any(loaded) and flat.separate_master:
                    flat.publish()

    def _with_masters(self, flat: Flat, states: dict[int, dict[str, Any] | None]) -> Tensor:
        """The master's values with those of a state dict in their places."""
        assert flat.host is not None
        values = flat.host.master().clone()
        for piece in flat.pieces:
            master = (states[id(flat.parameters[piece.slot])] or {}).get(MASTER)
            if master is not None:
                numel = piece.tensor.numel()
                part = flat.layout.slots[piece.slot].part(master)
                values[piece.offset :][:numel].copy_(part.reshape(-1)[piece.start :][:numel])
        return values

    def _agree_any(self, flag: bool) -> bool:
        return bool(self._fabric.maximum([int(flag)])[0])

    def _whole_states(self, flat: Flat) -> dict[int, dict[str, Any]]:
        """Per parameter of a flat, its state put together from all ranks."""
        mine: dict[int, dict[str, Any]] = {}
        parts: dict[str, list[tuple[int, Tensor]]] = {}
        master = flat.master if flat.separate_master else None
        known = self.state
        for piece in flat.pieces:
            state = dict(known.get(piece.tensor, {}))
            if master is not None:
                state[MASTER] = master[piece.offset :][: piece.tensor.numel()]
            if state:
                mine[piece.slot] = {}
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == piece.tensor.shape and value.dim() > 0:
                    parts.setdefault(name, []).append((piece.offset, value))
                else:
                    mine[piece.slot][name] = value.cpu() if isinstance(value, Tensor) else value
        everybody = self._fabric.gather_objects((mine, {name: found[0][1].dtype for name, found in parts.items()}))
        whole: dict[int, dict[str, Any]] = {}
        for states, _ in everybody:
            for index, state in states.items():
                whole.setdefault(index, {}).update(state)
        for name, dtype in sorted({entry for _, names in everybody for entry in names.items()}, key=lambda e: e[0]):
            flat_value = self._gather_named(flat, name, parts.get(name, []), dtype)
            for index, slot in enumerate(flat.layout.slots):
                if index in whole:
                    joined = parallel.whole(flat.parameters[index], slot.view(flat_value))
                    whole[index][name] = joined.to("cpu", copy=True)
        return whole

    def _gather_named(self, flat: Flat, name: str, parts: list[tuple[int, Tensor]], dtype: torch.dtype) -> Tensor:
        own = torch.zeros(flat.own.numel, dtype=dtype, device=self._fabric.device)
        for offset, value in parts:
            own[offset:][: value.numel()].copy_(value)
        if own.numel() == flat.layout.numel:
            return own
        whole = torch.empty(flat.layout.numel, dtype=own.dtype, device=own.device)
        self._fabric.gathers.all_gather(whole, own, f"{flat.label}.{name}").wait()
        return whole

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
        for gradient in self._reducer.gradients:
            gradient.hide()  # which sees what zero_grad() dropped
            gradient.show()
            if any(gradient.used):
                raise RuntimeError(
                    f"{what} between backward() and step(): the gradients of {gradient.label!r} would be lost; call it "
                    "after step(), or drop them first with zero_grad()"
                )

    def state_of(self, piece: MasterPiece) -> dict[str, Any]:
        """What the optimizer keeps for one piece, after ``settle``."""
        return dict(self._state.get(piece.tensor, {}))

    def common_state(self) -> dict[Any, Any]:
        """What the optimizer keeps for no parameter in particular; the same on all ranks, as elements do not enter."""
        return {key: value for key, value in self._state.items() if not isinstance(key, Tensor)}

    def take_common_state(self, state: dict[Any, Any]) -> None:
        """Takes it back."""
        common: dict[Any, Any] = self._state
        common.update(state)

    def forget_states(self) -> None:
        """Before states are loaded."""
        if self._host is not None:
            self._host.forget_states()
        self._state.clear()

    def room_for_state(self, flat: Flat, piece: MasterPiece, name: str, dtype: torch.dtype) -> Tensor | None:
        """Memory for one state of a piece, to be filled; None where this optimizer has no such state."""
        if self._host is not None and flat.host is not None:
            return self._host.room_for(flat, piece, name)
        known = type(self._original) in ELEMENTWISE  # whose states are of the master's dtype; others may have reasons
        kept = piece.tensor.dtype if dtype.is_floating_point and known else dtype
        room = self._state[piece.tensor][name] = torch.empty_like(piece.tensor, dtype=kept)
        return room

    def take_scalars(self, flat: Flat, piece: MasterPiece, scalars: dict[str, Any], moments: bool) -> None:
        """Takes state that belongs to the parameter as a whole, after ``room_for_state`` was filled."""
        if self._host is not None and flat.host is not None:
            self._host.set_count(flat, piece, int(scalars.get("step", 1 if moments else 0)))
            return
        group = self._group(flat, piece)
        on_device = group.get("fused") or group.get("capturable")  # where torch keeps it, too
        for name, value in scalars.items():
            if isinstance(value, Tensor):
                self._state[piece.tensor][name] = value.to(piece.tensor.device, copy=True) if on_device else value
            else:
                self._state[piece.tensor][name] = value

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


def check_covers(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """The optimizer must be over this model's parameters: all trainable ones, and no others."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    covered = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    foreign = sum(key not in names for key in covered)
    if foreign:
        raise ValueError(
            f"{foreign} of the optimizer's {len(covered)} parameters are not the model's; build the optimizer from "
            "model.parameters() of the model you shard (and after moving it, if you move it)"
        )
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in covered]
    if missing:
        raise ValueError(
            f"{_some(missing)} requires a gradient but is in no group of the optimizer; add it to the optimizer or "
            "freeze it with requires_grad_(False)"
        )


def _with_whole_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """State that the optimizer had before: of DTensors, it is in DTensors."""
    return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state.items()}


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return repr(names[0]) if len(names) == 1 else f"{names[0]!r} (and {len(names) - 1} more)"


def _refuse_old_handle(optimizer: torch.optim.Optimizer, *_: object) -> None:
    raise RuntimeError(
        "this optimizer was given to zeroshard.shard() and no longer trains anything; call step() on the optimizer "
        "that shard() returned"
    )
