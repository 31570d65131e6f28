"""Model states that sleep in host memory between phases of training, so that something else has the device.

Tensors keep their objects: the flat's buffers, the master, the optimizer's pieces and states. Only the memory behind
them changes. So nothing dangles. Views that user code has stored keep the memory that they show, on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..system import compat
from .flat import Flat, Presence


def resting_bytes(flat: Flat, states: Iterable[Tensor]) -> int:
    """How many bytes of device memory a flat gives back when it falls asleep."""
    return sum(compat.storage_sizes(_resting(flat, states)).values())


def fall_asleep(flat: Flat, states: Iterable[Tensor]) -> None:
    """Brings everything that a flat has on the device to host memory. Nothing of the flat may be under way.

    ``states`` are the optimizer's on the device.
    """
    if flat.presence is not Presence.ASLEEP:
        _move(_resting(flat, states), torch.device("cpu"))
        flat.shown.hide()
        flat.presence = Presence.ASLEEP


def wake_up(flat: Flat, states: Iterable[Tensor], device: torch.device) -> None:
    """Brings everything back to the device."""
    if flat.presence is Presence.ASLEEP:
        _move(_resting(flat, states), device)
        flat.home.woke()
        flat.presence = Presence.RELEASED if flat.sharded else Presence.PRESENT
        if not flat.sharded:
            flat.shown.show()
            flat.watch()


def _resting(flat: Flat, states: Iterable[Tensor]) -> list[Tensor]:
    whole = [] if flat.sharded else [flat.whole, *flat.shown.views]
    found = [flat.shard, *whole, *flat.home.resting_on_device(), *states]
    return [*found, *compat.bases(found)]


def _move(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Copies the storages behind tensors to a device, and points the tensors at the copies.

    The tensors are pointed elsewhere when all copies are made: if memory runs out, nothing has changed.
    """
    copies: dict[int, Tensor] = {}
    moved = {id(tensor): tensor for tensor in tensors if tensor.untyped_storage().nbytes()}
    keys = {id(tensor): compat.storage_key(tensor) for tensor in moved.values()}
    for tensor in moved.values():
        if keys[id(tensor)] not in copies:
            storage = tensor.untyped_storage()
            all_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device)
            all_bytes.set_(storage, 0, (storage.nbytes(),), (1,))
            copies[keys[id(tensor)]] = all_bytes.to(device, copy=True)
    for tensor in moved.values():
        memory = torch.empty(0, dtype=tensor.dtype, device=device)
        storage = copies[keys[id(tensor)]].untyped_storage()
        memory.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        compat.set_data([tensor], [memory])
