"""Memory that does not fragment: torch's expandable segments, turned on for this process (ZeRO's M_D).

Torch's allocator reserves GPU memory in segments and hands out pieces of them. If a tensor lives longer than its
neighbours, free pieces remain on both sides of it, and a large tensor may fit into none of them. An expandable segment
grows at its end instead. So one segment contains all tensors, and its free memory lies in fewer, larger pieces.
"""

from __future__ import annotations

import torch

from . import compat
from .sizes import size_text

VARIABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"


def defragment(device: torch.device) -> None:
    """Turns expandable segments on; raises where that would have no effect or comes too late."""
    if device.type != "cuda":
        raise ValueError("defragment=True has no effect on a CPU, where torch reserves no memory; leave it out")
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise ValueError(f"defragment=True has no effect on the {backend} allocator; leave one of them out")
    if compat.segments_expand():
        return
    torch.cuda.empty_cache()  # gives back segments that nothing uses any more
    reserved = torch.cuda.memory_reserved(device)
    if reserved:
        raise ValueError(
            f"defragment=True comes too late: this process uses {size_text(reserved)} of {device} in ordinary "
            "segments already; call shard() before anything is put on the GPU, with the model on the CPU or the meta "
            f"device, or start the process with {VARIABLE}"
        )
    compat.expand_segments()
    if not compat.segments_expand():
        raise ValueError("defragment=True has no effect here: this torch has no expandable segments; leave it out")
