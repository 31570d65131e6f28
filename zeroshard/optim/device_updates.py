"""The updates of flats on the device: the user's own optimizer, run on pieces of parameters."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config.bounds import FIRST_ELEMENTS, UPDATE_ELEMENTS
from ..config.layout import Piece
from ..config.optimizers import SCALARS, SUPPORTED
from ..config.table import Place
from ..states.device_home import DeviceHome
from ..states.flat import Flat
from ..states.updates import StateKeeper, Updates
from ..system import compat


class DeviceUpdates(Updates):
    """Runs the user's own optimizer on the pieces of flats that live on the device."""

    place = Place.DEVICE

    def __init__(self, original: torch.optim.Optimizer, flats: Sequence[Flat]) -> None:
        self._homes = {flat: flat.home for flat in flats if isinstance(flat.home, DeviceHome)}
        self._groups = original.param_groups
        self._number = {id(p): number for number, group in enumerate(self._groups) for p in group["params"]}
        self._known = type(original) in SUPPORTED
        self._inner = _on_pieces(original)

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Any]]:
        """What torch's optimizer keeps, by piece."""
        state: defaultdict[Tensor, dict[str, Any]] = self._inner.state
        return state

    @property
    def keepers(self) -> dict[Flat, StateKeeper]:
        return {flat: TorchStates(flat, self.state, self._group_of, known=self._known) for flat in self._homes}

    def _group_of(self, flat: Flat, piece: Piece) -> dict[str, Any]:
        return self._groups[self._number[id(flat.parameters[piece.slot])]]

    def update(self, order: list[Flat], step: int) -> Iterator[list[Flat]]:
        for batch in self._batches(order):
            self._update(batch)
            yield batch

    def _batches(self, order: list[Flat]) -> Iterator[list[Flat]]:
        """Flats to update together, in the order in which the next forward needs them.

        One call of the optimizer for many small flats saves launches; its gradients in the master's dtype exist only
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
        members: list[list[Tensor]] = [[] for _ in self._groups]
        updated = [flat for flat in flats if any(flat.gradient.used)]
        with compat.label(f"zeroshard.update {' '.join(flat.label for flat in updated)}"):
            for flat in updated:
                gradient = self._homes[flat].take_gradient()
                if gradient is None:
                    raise flat.gradient.missing()
                for (piece, tensor), part in zip(flat.pieces.items(), flat.by_piece(gradient), strict=True):
                    if flat.gradient.used[piece.slot]:
                        tensor.grad = part
                        members[self._number[id(flat.parameters[piece.slot])]].append(tensor)
            self._inner.param_groups = [
                {**group, "params": mine} for group, mine in zip(self._groups, members, strict=True)
            ]
            self._inner.step()
            for flat in updated:
                for tensor in flat.pieces.values():
                    tensor.grad = None
        for flat in updated:
            flat.publish()


class TorchStates(StateKeeper):
    """The states of one flat that torch's own optimizer keeps."""

    def __init__(
        self,
        flat: Flat,
        state: defaultdict[Tensor, dict[str, Any]],
        group_of: Callable[[Flat, Piece], dict[str, Any]],
        *,
        known: bool,
    ) -> None:
        self._flat, self._state, self._group_of, self._known = flat, state, group_of, known

    def load(self, piece: Piece, state: dict[str, Any]) -> None:
        tensor, slot = self._flat.pieces[piece], self._flat.layout.slots[piece.slot]
        loaded = {}
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == slot.whole_shape and name not in SCALARS:
                part = slot.part(value).reshape(-1)[piece.start : piece.stop]
                loaded[name] = part.to(device=tensor.device, dtype=tensor.dtype, copy=True)
            else:
                loaded[name] = self._scalar(piece, value)
        self._state[tensor] = loaded

    def room_for(self, piece: Piece, name: str, dtype: torch.dtype) -> Tensor | None:
        tensor = self._flat.pieces[piece]
        # Of the optimizers we know, states have the master's dtype. Others may have reasons for another one.
        chosen = tensor.dtype if dtype.is_floating_point and self._known else dtype
        room = self._state[tensor][name] = torch.empty_like(tensor, dtype=chosen)
        return room

    def take_scalars(self, piece: Piece, scalars: dict[str, Any], *, moments: bool) -> None:
        tensor = self._flat.pieces[piece]
        self._state[tensor].update({name: self._scalar(piece, value) for name, value in scalars.items()})

    def _scalar(self, piece: Piece, value: Any) -> Any:
        """A copy of a value that belongs to the parameter as a whole, on the device if torch has it there."""
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        group = self._group_of(self._flat, piece)
        on_device = group.get("fused") or group.get("capturable")
        return value.to(self._flat.pieces[piece].device, copy=True) if on_device else value.clone()

    def forget_states(self) -> None:
        for tensor in self._flat.pieces.values():
            self._state.pop(tensor, None)

    def device_states(self) -> list[Tensor]:
        states = [self._state[tensor] for tensor in self._flat.pieces.values() if tensor in self._state]
        return [value for state in states for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]


def _on_pieces(original: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A second optimizer of the user's class that works on pieces. Attributes of other classes come along."""
    inner = copy.copy(original)
    for name, value in vars(original).items():
        if name != "step":  # a scheduler's wrapper around the old handle
            inner.__dict__.setdefault(name, value)
    inner.param_groups, inner.state = [], defaultdict(dict)
    return inner
