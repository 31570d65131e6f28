"""The memory of a device that this process may still use, and which processes of a job share a GPU."""

from __future__ import annotations

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
