"""Tensors on the meta device: how they get memory, and how to tell whether somebody then wrote to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..comm import parallel
from ..comm.fabric import Fabric
from ..shown.absent import mark_present
from ..states.flat import Flat
from ..system import compat


def give_memory(tensor: Tensor, memory: Tensor) -> None:
    """Takes a tensor off the meta device. The object stays: the optimizer, the user and tied modules refer to it."""
    if isinstance(tensor, DTensor):
        compat.point(tensor, memory.data)
        return
    if isinstance(tensor, nn.Parameter):
        real: Tensor = nn.Parameter(memory.data, requires_grad=tensor.requires_grad)  # .data: a version of its own
    else:
        real = memory.data
    real.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, real)


def point_at(flat: Flat, origin: Tensor) -> None:
    """Makes the parameters of a flat views of ``origin``, whether they were on the meta device or not."""
    mark_present(flat.parameters)
    for view, parameter in zip(flat.views_of(origin), flat.parameters, strict=True):
        if parameter.is_meta:
            give_memory(parameter, view)
        else:
            compat.point(parameter, view)


def take_off_meta(flat: Flat, device: torch.device) -> Tensor:
    """Takes the parameters of a flat off the meta device. Returns new memory for the range that rests on this rank."""
    for parameter in flat.parameters:
        if parameter.is_meta:
            nothing = torch.empty((), dtype=parameter.dtype, device=device)
            give_memory(parameter, nothing.expand(parallel.local(parameter).shape))
    return torch.zeros(flat.at_rest.numel, dtype=flat.master_dtype, device=device)


@contextmanager
def meta_again_after_an_error(model: nn.Module) -> Iterator[None]:
    """Puts the model back on the meta device if an error is raised, so that a refused model stays as it was."""
    parameters = [(p, torch.empty_like(parallel.local(p), device="meta")) for p in model.parameters() if p.is_meta]
    buffers = [(m, name, b) for m in model.modules() for name, b in m.named_buffers(recurse=False) if b.is_meta]
    try:
        yield
    except BaseException:
        for parameter, memory in parameters:
            if not parameter.is_meta:
                give_memory(parameter, memory)
        for module, name, buffer in buffers:
            if not buffer.is_meta:
                give_memory(buffer, torch.empty_like(buffer, device="meta"))
            setattr(module, name, buffer)
        raise


class Blank(NamedTuple):
    """A buffer that got memory, and how to tell whether an initialiser wrote to it."""

    module: nn.Module
    name: str
    """The buffer's name in the model."""
    value: Tensor
    version: int

    def written(self) -> bool:
        now = getattr(self.module, self.name.rpartition(".")[2])
        if now is None or now.is_meta or now.numel() == 0:
            return now is None or not now.is_meta
        if now is not self.value or compat.version(now) != self.version:
            return not has_nan(now)
        return not bool((now == blank_value(now.dtype)).all()) and not has_nan(now)


def blank_value(dtype: torch.dtype) -> float | bool:
    """The value that fills memory before an initialiser writes to it: NaN, or the lowest value of an integer dtype."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def has_nan(tensor: Tensor) -> bool:
    """Whether any element is NaN, in any dtype."""
    if tensor.itemsize == 1 and tensor.is_floating_point():
        tensor = tensor.float()
    return bool(tensor.isnan().any())


def blank_buffers(model: nn.Module, device: torch.device) -> list[Blank]:
    """Gives memory to all buffers on the meta device. Buffers are whole on every rank."""
    blanks = []
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if buffer.is_meta:
                give_memory(buffer, torch.full_like(buffer, blank_value(buffer.dtype), device=device))
                blanks.append(Blank(module, name, buffer, compat.version(buffer)))
    return blanks


def refuse_unset(model: nn.Module, unset: Iterable[str], fabric: Fabric) -> None:
    """Raises if there are tensors without values on rank 0, whose values count. Names them by module."""
    found: list[str] = fabric.from_rank_zero(list(unset))
    if not found:
        return
    by_module: dict[str, list[str]] = {}
    for full_name in found:
        module, _, name = full_name.rpartition(".")
        by_module.setdefault(module, []).append(name)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    listed = "; ".join(
        f"module {name or '(root)'!r} ({kinds[name]}): {', '.join(tensors)}" for name, tensors in by_module.items()
    )
    raise ValueError(
        f"on the meta device and without an initialiser that sets them: {listed}. Give each module a "
        "reset_parameters() that sets its parameters and computes its buffers, pass init=, or build the model on the "
        "CPU"
    )
