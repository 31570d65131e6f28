"""The states of the sharded optimizer, and the way to torch's whole state dict and back.

States belong to pieces of parameters. For flats on the device, they are where torch's own optimizer puts them. For
flats on the host, they are in the flats' homes. A state dict is put together from all ranks' pieces, one flat at a
time. A state dict that is loaded is cut into pieces again.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..comm import parallel
from ..comm.fabric import Fabric
from ..config.layout import Piece
from ..config.optimizers import SCALARS
from ..states.flat import Flat
from ..states.updates import FlatStates, Updates

MASTER = "master"
"""Name, in a state dict, of the fp32 value behind a 16-bit parameter."""


class PieceStates:
    """The states of an optimizer, by piece."""

    def __init__(
        self, state: defaultdict[Tensor, dict[str, Any]], flats: list[Flat], updates: Sequence[Updates], fabric: Fabric
    ) -> None:
        self._state, self._flats, self._updates, self._fabric = state, flats, updates, fabric
        self._states_of = {flat: states for each in updates for flat, states in each.states_of.items()}
        self._loads = 0

    def settled(self) -> defaultdict[Tensor, dict[str, Any]]:
        """All states, after the updates that are under way."""
        for each in self._updates:
            each.wait()
        for states in self._states_of.values():
            self._state.update(states.states())
        return self._state

    def shape(self) -> tuple[int, int, int]:
        """Changes when state tensors are made or loaded. If it is the same, the states' sizes are the same."""
        states = [state for state in self._state.values() if isinstance(state, dict)]
        values = chain.from_iterable(map(dict.values, states))
        tensors = sum(map(isinstance, values, repeat(Tensor)))  # no bytecode for each value: every step counts them
        return self._loads, len(self._state), tensors

    def on_device(self) -> list[Tensor]:
        """The states that live on the device, for the memory ledger."""
        return [tensor for states in self.by_flat().values() for tensor in states]

    def by_flat(self) -> dict[Flat, list[Tensor]]:
        """The states that live on the device."""
        return {flat: states.device_states() for flat, states in self._states_of.items()}

    def take_over(self, original: torch.optim.Optimizer) -> None:
        """Cuts state that the optimizer already has into pieces."""
        for flat in self._flats:
            for piece in flat.pieces:
                parameter = flat.parameters[piece.slot]
                if parameter in original.state:
                    self._load(flat, piece, _with_whole_tensors(original.state[parameter]))
        self.take_common({key: value for key, value in original.state.items() if not isinstance(key, Tensor)})
        original.state.clear()

    def _load(self, flat: Flat, piece: Piece, state: dict[str, Any]) -> None:
        """Takes one parameter's whole state, as torch's optimizers have it, without the master."""
        states, slot, scalars = self._states_of[flat], flat.layout.slots[piece.slot], {}
        moments = False
        for name, value in state.items():
            if not isinstance(value, Tensor) or value.shape != slot.whole_shape or name in SCALARS:
                scalars[name] = value
            elif (room := states.room_for(piece, name, flat.pieces[piece].dtype)) is not None:
                room.copy_(slot.part(value).reshape(-1)[piece.start : piece.stop])
                moments = True
        states.take_scalars(piece, scalars, moments=moments)

    # -- state dict -----------------------------------------------------------------------------------------------

    def state_dict(self, param_groups: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole state in torch's format, a copy on the CPU of every rank. Collective."""
        numbers = {id(p): n for n, p in enumerate(p for group in param_groups for p in group["params"])}
        packed: dict[int, dict[str, Any]] = {}
        for flat in self._flats:
            for index, state in self._whole_states(flat).items():
                packed[numbers[id(flat.parameters[index])]] = state
        groups = []
        for group in param_groups:
            settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            groups.append({**settings, "params": [numbers[id(p)] for p in group["params"]]})
        return {"state": {**dict(sorted(packed.items())), **copy.deepcopy(self.common())}, "param_groups": groups}

    def load_state_dict(self, param_groups: list[dict[str, Any]], state_dict: dict[str, Any]) -> None:
        """Takes a whole state in torch's format, the settings of groups included. Collective."""
        groups = state_dict["param_groups"]
        ours = [len(group["params"]) for group in param_groups]
        if [len(group["params"]) for group in groups] != ours:
            raise ValueError(
                f"the state dict has groups of {[len(group['params']) for group in groups]} parameters, the optimizer "
                f"{ours}; build it with the same groups"
            )
        for mine, theirs in zip(param_groups, groups, strict=True):
            mine.update({key: copy.deepcopy(value) for key, value in theirs.items() if key != "params"})
        order = [key for group in groups for key in group["params"]]
        members = [p for group in param_groups for p in group["params"]]
        states = {id(p): state_dict["state"].get(key) for key, p in zip(order, members, strict=True)}
        self.forget()
        known = set(order)
        common = {key: value for key, value in state_dict["state"].items() if key not in known}
        self.take_common(copy.deepcopy(common))
        with torch.no_grad():
            for flat in self._flats:
                masters: dict[Piece, Tensor] = {}
                for piece in flat.pieces:
                    state = dict(states[id(flat.parameters[piece.slot])] or {})
                    master = state.pop(MASTER, None)
                    if master is not None:
                        masters[piece] = master
                    if state:
                        self._load(flat, piece, state)
                if masters and flat.home.separate_master:
                    flat.home.adopt(_with_masters(flat, masters))
                if self._fabric.maximum([int(bool(masters))])[0] and flat.home.separate_master:
                    flat.publish()

    def _whole_states(self, flat: Flat) -> dict[int, dict[str, Any]]:
        """The state of each parameter of a flat, put together from all ranks."""
        mine: dict[int, dict[str, Any]] = {}
        parts: dict[str, dict[Piece, Tensor]] = {}
        master = flat.home.master() if flat.home.separate_master else None
        known = self.settled()
        for piece, tensor in flat.pieces.items():
            state = dict(known.get(tensor, {}))
            if master is not None:
                state[MASTER] = master[piece.offset :][: piece.numel]
            if state:
                mine[piece.slot] = {}
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == tensor.shape and value.dim() > 0:
                    parts.setdefault(name, {})[piece] = value
                else:
                    copied = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
                    mine[piece.slot][name] = copied
        named = {
            name: (next(iter(found.values())).dtype, {piece.slot for piece in found}) for name, found in parts.items()
        }
        everybody = self._fabric.gather_objects((mine, named))
        whole: dict[int, dict[str, Any]] = {}
        dtypes: dict[str, torch.dtype] = {}
        owners: dict[str, set[int]] = {}
        for states, theirs in everybody:
            for index, state in states.items():
                whole.setdefault(index, {}).update(state)
            for name, (dtype, slots) in theirs.items():
                dtypes[name] = dtype
                owners.setdefault(name, set()).update(slots)
        for name, dtype in sorted(dtypes.items()):
            flat_value = self._gather_named(flat, name, parts.get(name, {}), dtype)
            for index in sorted(owners[name]):  # a parameter that has made no step has no such state on any rank
                joined = parallel.whole(flat.parameters[index], flat.layout.slots[index].view(flat_value))
                whole[index][name] = joined.to("cpu", copy=True)
        return whole

    def _gather_named(self, flat: Flat, name: str, parts: dict[Piece, Tensor], dtype: torch.dtype) -> Tensor:
        own = torch.zeros(flat.own.numel, dtype=dtype, device=self._fabric.device)
        for piece, value in parts.items():
            own[piece.offset :][: piece.numel].copy_(value)
        if own.numel() == flat.layout.numel:
            return own
        whole = torch.empty(flat.layout.numel, dtype=own.dtype, device=own.device)
        self._fabric.gathers.all_gather(whole, own, f"{flat.label}.{name}").wait()
        return whole

    # -- for checkpoints ------------------------------------------------------------------------------------------

    def of(self, tensor: Tensor) -> dict[str, Any]:
        """The states of one piece, after ``settled``."""
        return dict(self._state.get(tensor, {}))

    def common(self) -> dict[Any, Any]:
        """State of the optimizer that belongs to no parameter. It depends on no element, so all ranks have the same."""
        return {key: value for key, value in self._state.items() if not isinstance(key, Tensor)}

    def take_common(self, state: dict[Any, Any]) -> None:
        """Takes what ``common`` returned."""
        common: dict[Any, Any] = self._state
        common.update(state)

    def forget(self) -> None:
        """Forgets all states, before others are loaded."""
        for states in self._states_of.values():
            states.forget_states()
        self._state.clear()
        self._loads += 1

    def takes(self, name: str) -> bool:
        """Whether there is room for a state of this name."""
        return all(states.takes(name) for states in self._states_of.values())

    def of_flat(self, flat: Flat) -> FlatStates:
        """The states of one flat, to be loaded piece by piece."""
        return self._states_of[flat]


def _with_masters(flat: Flat, masters: dict[Piece, Tensor]) -> Tensor:
    """The master's values. The masters of a state dict replace the present values of their pieces."""
    values = flat.home.master().clone()
    for piece, master in masters.items():
        whole = flat.layout.slots[piece.slot].part(master).reshape(-1)
        values[piece.offset :][: piece.numel].copy_(whole[piece.start : piece.stop])
    return values


def _with_whole_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """State from before ``shard()``, with whole tensors in place of DTensors."""
    return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state.items()}
