"""Memory that live tensors hold, asked from the garbage collector."""

from __future__ import annotations

import gc

import torch

from zeroshard.system import compat


def live_storages() -> dict[int, int]:
    """Bytes of every storage that a tensor of this process uses, by address. Tensors without values have none."""
    gc.collect()
    found = {}
    with compat.plain():  # absent parameters stay absent
        for tensor in gc.get_objects():
            if isinstance(tensor, torch.Tensor) and not compat.is_fake(tensor):
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found


def live_bytes() -> int:
    """The bytes of all of them."""
    return sum(live_storages().values())
