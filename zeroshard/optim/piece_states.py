"""What the sharded optimizer keeps for its pieces, and the way to torch's whole state dict and back.

States belong to pieces of parameters, as torch's own optimizer made them; those that live on the host are behind
``HostUpdate``. A state dict is put together from all ranks' pieces, a parameter at a time, and cut into pieces again.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..comm import parallel
from ..comm.fabric import Fabric
from ..config.optimizers import SCALARS, SUPPORTED
from ..states.flat import Flat, MasterPiece
from .hosted import HostUpdate

MASTER = "master"
"""Name, in a state dict, of the fp32 value behind a 16-bit parameter."""


class PieceStates:
    """By piece, what an optimizer keeps."""

    def __init__(
        self,
        state: defaultdict[Tensor, dict[str, Any]],
        flats: list[Flat],
        *,
        kind: type[torch.optim.Optimizer],
        host: HostUpdate | None,
        fabric: Fabric,
        group_of: Callable[[Flat, MasterPiece], dict[str, Any]],
    ) -> None:
        self._state, self._flats, self._kind = state, flats, kind
        self._host, self._fabric, self._group_of = host, fabric, group_of
        self._loads = 0

    def settled(self) -> defaultdict[Tensor, dict[str, Any]]:
        """All of it, after the updates that are under way on the host."""
        if self._host is not None:
            self._host.pipeline.wait()
            self._host.show_steps()
        return self._state

    def shape(self) -> tuple[int, int, int]:
        """Changes when tensors come into being or are loaded, for the memory ledger: no step changes their sizes."""
        states = [state for state in self._state.values() if isinstance(state, dict)]
        tensors = sum(isinstance(value, Tensor) for state in states for value in state.values())
        return self._loads, len(self._state), tensors

    def on_device(self) -> list[Tensor]:
        """The states that live on the device, for the memory ledger."""
        on_host = set() if self._host is None else {piece.tensor for f in self._host.flats for piece in f.pieces}
        states = [state for piece, state in self._state.items() if isinstance(piece, Tensor) and piece not in on_host]
        return [value for state in states for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]

    def take_over(self, original: torch.optim.Optimizer) -> None:
        """Cuts state that the optimizer already has into pieces."""
        for flat in self._flats:
            for piece in flat.pieces:
                parameter = flat.parameters[piece.slot]
                if parameter in original.state:
                    self._load_piece(flat, piece, _with_whole_tensors(original.state[parameter]))
        self.take_common({key: value for key, value in original.state.items() if not isinstance(key, Tensor)})
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
                group = self._group_of(flat, piece)
                on_device = group.get("fused") or group.get("capturable")  # where torch keeps it, too
                loaded[name] = value.to(piece.tensor.device, copy=True) if on_device else value.clone()
            else:
                loaded[name] = copy.deepcopy(value)
        self._state[piece.tensor] = loaded

    # -- state dict -----------------------------------------------------------------------------------------------

    def state_dict(self, param_groups: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole state in torch's format, a copy on the CPU of every rank. Collective."""
        numbers = {id(p): n for n, p in enumerate(p for group in param_groups for p in group["params"])}
        packed: dict[int, dict[str, Any]] = {}
        for flat in self._flats:
            for index, state in self._whole_states(flat).items():
                packed[numbers[id(flat.parameters[index])]] = state
        start, groups = 0, []
        for group in param_groups:
            members = range(start, start + len(group["params"]))
            settings = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            groups.append({**settings, "params": list(members)})
            start = members.stop
        return {"state": {**dict(sorted(packed.items())), **copy.deepcopy(self.common())}, "param_groups": groups}

    def load_state_dict(self, param_groups: list[dict[str, Any]], state_dict: dict[str, Any]) -> None:
        """Takes a whole state in torch's format, into the groups too. Collective."""
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
        known = self.settled()
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
                    copied = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
                    mine[piece.slot][name] = copied
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

    def of(self, piece: MasterPiece) -> dict[str, Any]:
        """What the optimizer keeps for one piece, once the host has nothing to do."""
        return dict(self._state.get(piece.tensor, {}))

    def common(self) -> dict[Any, Any]:
        """What the optimizer keeps for no parameter in particular; the same on all ranks, as elements do not enter."""
        return {key: value for key, value in self._state.items() if not isinstance(key, Tensor)}

    def take_common(self, state: dict[Any, Any]) -> None:
        """Takes it back."""
        common: dict[Any, Any] = self._state
        common.update(state)

    def forget(self) -> None:
        """Before states are loaded."""
        if self._host is not None:
            self._host.forget_states()
        self._state.clear()
        self._loads += 1

    def takes(self, name: str) -> bool:
        """Whether there is room for a state of this name: the host has that of its own rules, torch of any."""
        return self._host is None or self._host.has_moment(name)

    def room_for(self, flat: Flat, piece: MasterPiece, name: str, dtype: torch.dtype) -> Tensor | None:
        """Memory for one state of a piece, to be filled; None where this optimizer has no such state."""
        if self._host is not None and flat.host is not None:
            return self._host.room_for(flat, piece, name)
        known = self._kind in SUPPORTED  # whose states are of the master's dtype; others may have reasons
        kept = piece.tensor.dtype if dtype.is_floating_point and known else dtype
        room = self._state[piece.tensor][name] = torch.empty_like(piece.tensor, dtype=kept)
        return room

    def take_scalars(self, flat: Flat, piece: MasterPiece, scalars: dict[str, Any], moments: bool) -> None:
        """Takes state that belongs to the parameter as a whole, after ``room_for`` was filled."""
        if self._host is not None and flat.host is not None:
            self._host.set_count(flat, piece, int(scalars.get("step", 1 if moments else 0)))
            return
        group = self._group_of(flat, piece)
        on_device = group.get("fused") or group.get("capturable")  # where torch keeps it, too
        for name, value in scalars.items():
            if isinstance(value, Tensor):
                self._state[piece.tensor][name] = value.to(piece.tensor.device, copy=True) if on_device else value
            else:
                self._state[piece.tensor][name] = value


def _with_whole_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """State that the optimizer had before: of DTensors, it is in DTensors."""
    return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state.items()}
