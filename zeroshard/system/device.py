"""The memory of a device: what this process may still use, has in use, and had in use at most; who shares a GPU."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import torch

from . import machine


def available_memory(device: torch.device, sharing: int = 1) -> int:
    """Bytes of device memory that this process may still use.

    ``sharing``: processes of this job that use the device, this one included. What is free is divided among them. Other
    programs on the GPU, and ``torch.cuda.set_per_process_memory_fraction``, leave less.
    """
    if device.type != "cuda":
        return machine.available_memory() // sharing
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    unused = torch.cuda.memory_reserved(device) - allocated  # torch's allocator has it and can hand it out
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - allocated
    return max(0, min(free // sharing + unused, allowed))


def identity(device: torch.device) -> str:
    """A text that is the same on all processes that use a GPU, whatever number each of them gives it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def local_ranks(world: int) -> int:
    """How many of ``world`` ranks share this host: all, unless torchrun says otherwise."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def device_ranks(device: torch.device, local: int, gather: Callable[[str], list[str]]) -> int:
    """How many ranks share this rank's device, and so its memory. On CPUs these are the ``local`` ranks of this host.

    Every rank calls this. ``gather`` brings every rank's text to all ranks.
    """
    if device.type != "cuda":
        return local
    mine = identity(device)
    return gather(mine).count(mine)


def used_memory(device: torch.device) -> int:
    """Bytes of device memory that this process has in use; on a GPU, those that torch has allocated."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def begin_peak(device: torch.device) -> None:
    """Forgets the peak until now, where that is possible: on a GPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """The most bytes that were in use since ``begin_peak``. On a CPU: since the process began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return max(used_memory(device), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)  # the latter may be late


def release_cached(device: torch.device) -> None:
    """Gives memory back that torch's allocator has for tensors of other sizes. Waits for the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
