"""The updates of flats on the device: the user's own optimizer, run on pieces of parameters."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.fabric import Fabric
from ..config.bounds import FIRST_ELEMENTS, UPDATE_ELEMENTS
from ..config.layout import Piece
from ..config.optimizers import SUPPORTED
from ..states.device_home import DeviceHome, round_masters
from ..states.flat import Flat, publish_rounded
from ..states.stash import take_all
from ..states.updates import FlatStates, Updates
from ..system import compat, trace
from .foreign import step_freely


class _Member(NamedTuple):
    """A piece for torch's optimizer."""

    tensor: Tensor
    slot: int
    """Which of the flat's parameters it belongs to."""
    group: int
    """The number of its group."""


class DeviceUpdates(Updates):
    """Runs the user's own optimizer on the pieces of flats that live on the device."""

    def __init__(self, original: torch.optim.Optimizer, flats: Sequence[Flat], fabric: Fabric) -> None:
        self._fabric = fabric
        self._homes = {flat: flat.home for flat in flats if isinstance(flat.home, DeviceHome)}
        self._number = {id(p): number for number, group in enumerate(original.param_groups) for p in group["params"]}
        self._members = {flat: [self._member(flat, piece) for piece in flat.pieces] for flat in self._homes}
        self._inner = _on_pieces(original)
        self.state: defaultdict[Tensor, dict[str, Any]] = self._inner.state
        """The states of torch's optimizer, by piece."""
        self.is_known = type(original) in SUPPORTED
        """Whether this is an optimizer of torch, whose states have the master's dtype."""

    @property
    def states_of(self) -> dict[Flat, FlatStates]:
        return {flat: TorchStates(flat, self) for flat in self._homes}

    def group_of(self, flat: Flat, piece: Piece) -> dict[str, Any]:
        """The settings that a piece is updated with."""
        return self.steered_by.param_groups[self._member(flat, piece).group]

    def _member(self, flat: Flat, piece: Piece) -> _Member:
        return _Member(flat.pieces[piece], piece.slot, self._number[id(flat.parameters[piece.slot])])

    def update(self, order: list[Flat], step: int) -> Iterator[list[Flat]]:
        for batch in self._batches(order):
            trace.phase("update")
            self._update(batch)
            trace.phase(None)
            yield batch

    def _batches(self, order: list[Flat]) -> Iterator[list[Flat]]:
        """Flats to update together, in the order in which the next forward needs them.

        One call of the optimizer for many small flats saves kernel launches. The gradients in the master's dtype exist
        during the call, so a batch is bounded (C_B).
        """
        batch: list[Flat] = []
        elements, enough = 0, FIRST_ELEMENTS
        for flat in reversed(order):
            if flat not in self._homes:
                continue
            batch.append(flat)
            elements += flat.own.numel
            if elements >= enough:
                yield batch
                batch, elements, enough = [], 0, UPDATE_ELEMENTS
        if batch:
            yield batch

    def _update(self, flats: list[Flat]) -> None:
        members: list[list[Tensor]] = [[] for _ in self.steered_by.param_groups]
        updated = [flat for flat in flats if any(flat.gradient.used)]
        with compat.label("zeroshard.update", *(flat.label for flat in updated)):
            gradients = take_all([self._homes[flat].request() for flat in updated])
            for flat, gradient in zip(updated, gradients, strict=True):
                if gradient is None:
                    raise flat.gradient.missing()
                used = flat.gradient.used
                for (tensor, slot, number), part in zip(self._members[flat], flat.by_piece(gradient), strict=True):
                    if used[slot]:
                        tensor.grad = part
                        members[number].append(tensor)
            self._inner.param_groups = [
                {**group, "params": mine} for group, mine in zip(self.steered_by.param_groups, members, strict=True)
            ]
            self._inner.step()
            for tensor in chain.from_iterable(members):
                tensor.grad = None
        for flat in updated:
            flat.finish_gather()
        round_masters(self._homes[flat] for flat in updated)
        publish_rounded(updated, self._fabric)


class TorchStates(FlatStates):
    """The states of one flat in torch's own optimizer."""

    def __init__(self, flat: Flat, updates: DeviceUpdates) -> None:
        self._flat, self._updates, self._state = flat, updates, updates.state

    def room_for(self, piece: Piece, name: str, dtype: torch.dtype) -> Tensor | None:
        tensor = self._flat.pieces[piece]
        # States of torch's optimizers have the master's dtype. Other optimizers may have reasons for another dtype.
        chosen = tensor.dtype if dtype.is_floating_point and self._updates.is_known else dtype
        room = self._state[tensor][name] = torch.empty_like(tensor, dtype=chosen)
        return room

    def take_scalars(self, piece: Piece, scalars: dict[str, Any], *, moments: bool) -> None:
        tensor, group = self._flat.pieces[piece], self._updates.group_of(self._flat, piece)
        on_device = group.get("fused") or group.get("capturable")
        for name, value in scalars.items():
            if not isinstance(value, Tensor):
                copied = copy.deepcopy(value)
            else:
                copied = value.to(tensor.device, copy=True) if on_device else value.clone()
            self._state[tensor][name] = copied

    def forget_states(self) -> None:
        for tensor in self._flat.pieces.values():
            self._state.pop(tensor, None)

    def device_states(self) -> list[Tensor]:
        states = [self._state[tensor] for tensor in self._flat.pieces.values() if tensor in self._state]
        return [value for state in states for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]


def _on_pieces(original: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A second optimizer of the user's class that works on pieces. It has the attributes of the first one too."""
    inner = copy.copy(original)
    for name, value in vars(original).items():
        if name != "step":  # a scheduler may have replaced step() of the user's own object
            inner.__dict__.setdefault(name, value)
    inner.param_groups, inner.state = [], defaultdict(dict)
    step_freely(inner)
    return inner
