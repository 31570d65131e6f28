"""The memory that a rank may use on the machine where it is about to train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..comm.parallel import local
from ..config.options import Config
from ..system import machine as facts
from ..system.device import available_memory


class Room(NamedTuple):
    """Memory that a rank may use, in bytes."""

    device: int
    host: int
    local_ranks: int = 1
    """Ranks that share the host."""
    title: str = ""
    """The device's own name."""
    on_cpu: bool = False
    """True if ranks compute in host memory."""


def room_of(
    model: nn.Module,
    device: torch.device,
    config: Config | None = None,
    *,
    local_ranks: int = 1,
    device_ranks: int = 1,
) -> Room:
    """The room of this rank. Parameters that are already on the device will move, so their memory counts as free.

    ``local_ranks`` share the host, ``device_ranks`` the device. The options may limit the host memory of a rank.
    """
    limits = None if config is None else config.choice or config.offload
    movable = sum(local(parameter).nbytes for parameter in model.parameters() if parameter.device == device)
    free, title = available_memory(device, device_ranks) + movable, facts.device_title(device)
    if device.type != "cuda":
        share = min(free, facts.usable_memory() // local_ranks)
        return Room(share, share, local_ranks, title, on_cpu=True)
    host = facts.available_memory() // local_ranks
    if limits is not None and limits.host_memory is not None:
        host = min(host, limits.host_memory)
    return Room(free, host, local_ranks, title)


def least(rooms: Sequence[Room]) -> Room:
    """The room that every rank has: the minimum of all rooms."""
    first = rooms[0]
    device, host = min(room.device for room in rooms), min(room.host for room in rooms)
    return Room(device, host, first.local_ranks, first.title, first.on_cpu)
