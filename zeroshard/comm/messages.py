"""Many small tensors as the bytes of one message: a model with batch norm has hundreds of buffers of a few bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..system import compat


def in_messages(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Divides tensors into messages of at most ``most`` bytes, unless one tensor is larger.

    The division depends on shapes and dtypes alone, so that ranks agree on it. Wide dtypes come first: each tensor then
    begins at a multiple of its element's size.
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
    """The tensors' bytes, one after the other, in memory of their own."""
    return torch.cat([_bytes_of(tensor).to(device) for tensor in tensors])


def unpack(message: Tensor, tensors: Sequence[Tensor]) -> None:
    """Writes the bytes of a message that ``pack`` has made to the tensors."""
    parts = message.split([tensor.nbytes for tensor in tensors])
    kinds: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for tensor, part in zip(tensors, parts, strict=True):
        target, source = _distinct(tensor, part.view(tensor.dtype).view(tensor.shape))
        if target.is_conj() or target.is_neg():  # which torch cannot copy with others
            target.copy_(source)
        else:
            targets, sources = kinds.setdefault((target.dtype, target.device), ([], []))
            targets.append(target)
            sources.append(source)
    for targets, sources in kinds.values():
        compat.copy_all(targets, sources)


def _distinct(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors, without the elements that ``expand()`` shows again: each place of memory is written once."""
    for dimension, stride in reversed(list(enumerate(target.stride()))):
        if stride == 0 and target.shape[dimension]:
            target, source = target.select(dimension, 0), source.select(dimension, 0)
    return target, source


def _bytes_of(tensor: Tensor) -> Tensor:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride
