"""Packs many small tensors into one message.

A model with batch norm has hundreds of buffers of a few bytes. One broadcast for each would be slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..system import compat


def in_messages(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Divides tensors into messages of at most ``most`` bytes. A larger tensor is a message by itself.

    The division depends only on shapes and dtypes, so all ranks divide alike. Wide dtypes come first, so each tensor
    begins at a multiple of its element size.
    """
    if any(tensor.layout is not torch.strided for tensor in tensors):
        raise ValueError("a sparse buffer cannot be sent to other ranks; make it dense with to_dense()")
    message: list[Tensor] = []
    size = 0
    for tensor in sorted(tensors, key=lambda tensor: -tensor.itemsize):
        if message and size + tensor.nbytes > most:
            yield message
            message, size = [], 0
        message.append(tensor)
        size += tensor.nbytes
    if message:
        yield message


def pack(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Copies the bytes of the tensors, one tensor after the other, into a new tensor."""
    return torch.cat([_bytes_of(tensor).to(device) for tensor in tensors])


def unpack(message: Tensor, tensors: Sequence[Tensor]) -> None:
    """Writes a message made by ``pack`` into the tensors."""
    parts = message.split([tensor.nbytes for tensor in tensors])
    kinds: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for tensor, part in zip(tensors, parts, strict=True):
        target, source = _distinct(tensor, part.view(tensor.dtype).view(tensor.shape))
        if target.is_conj() or target.is_neg():  # torch cannot copy such views together with others
            target.copy_(source)
        else:
            targets, sources = kinds.setdefault((target.dtype, target.device), ([], []))
            targets.append(target)
            sources.append(source)
    for targets, sources in kinds.values():
        compat.copy_all(targets, sources)


def _distinct(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors without the dimensions that ``expand()`` added, so that each element in memory is written once."""
    for dimension, stride in reversed(list(enumerate(target.stride()))):
        if stride == 0 and target.shape[dimension]:
            target, source = target.select(dimension, 0), source.select(dimension, 0)
    return target, source


def _bytes_of(tensor: Tensor) -> Tensor:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride
