"""The global gradient norm, and the factor that clips gradients to it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.fabric import DisagreementError, Fabric
from ..states.flat import Flat, gradient_of
from ..system import compat

REPLICAS_APART = 1e-2
"""Gradients that should be the same may differ by rounding, where kernels add in no fixed order, and by no more."""


def global_norm(flats: list[Flat], fabric: Fabric) -> Tensor:
    """The 2-norm of the whole model's averaged gradients, an fp64 scalar on the device.

    Each rank sums the squares of its own shards, the partial sums are added in rank order: all stages and all ranks
    get the same bits. What every model-parallel rank has whole is counted by the first of them.
    """
    if fabric.model.rank > 0:
        flats = [flat for flat in flats if flat.divided]
    parts = {flat: part for flat in flats if (part := gradient_of(flat).part(flat.shard_range)) is not None}
    found = dict(zip(parts, compat.norms([part for part, _ in parts.values()], torch.float64), strict=True))
    factors = {flat: factor for flat, (_, factor) in parts.items()}
    for flat in flats:
        on_host = gradient_of(flat).host_norm() if flat not in parts else None
        if on_host is not None:
            found[flat], factors[flat] = on_host
    ordered = [flat for flat in flats if flat in found]
    if not ordered:
        mine = torch.zeros((), dtype=torch.float64, device=fabric.device)
    else:
        norms = torch.stack([found[flat] for flat in ordered])
        if any(factor is not None for factor in factors.values()):
            one = torch.ones((), device=fabric.device)
            norms = norms * torch.stack([one if (f := factors[flat]) is None else f for flat in ordered])
        mine = norms.square().sum()
    return fabric.sum_in_order(mine).sqrt()


def local_norms(flats: list[Flat]) -> list[Tensor]:
    """The norm of each flat's averaged gradient, of the part on this rank; of those that have one."""
    found = []
    for flat in flats:
        part = gradient_of(flat).part(flat.shard_range)
        if part is not None:
            found += compat.norms([part[0]], torch.float64)
        elif (on_host := gradient_of(flat).host_norm()) is not None:
            found.append(on_host[0])
    return found


def check_replicas_agree(flats: list[Flat], fabric: Fabric) -> None:
    """What every tensor-parallel rank has whole must have one gradient on all of them, or its values drift apart.

    Asked in the first step, and in the first after a load, for it waits for the device. Gradients that are on the
    host by then are not seen.
    """
    parts = {flat: gradient_of(flat).part(flat.shard_range) for flat in flats if not flat.divided}
    held = {flat: part[0] for flat, part in parts.items() if part is not None}
    if fabric.model.world == 1 or fabric.backend == "fake" or not held:
        return
    norms = fabric.model.gather_small(torch.stack(compat.norms(list(held.values()), torch.float64)))
    apart = norms.amax(0) - norms.amin(0) > REPLICAS_APART * norms.amax(0)
    for flat, differs in zip(held, apart.tolist(), strict=True):
        if differs:
            raise DisagreementError(
                f"the gradients of {flat.layout.slots[0].name!r} and its neighbours, which every tensor-parallel rank "
                "has whole, differ among these ranks. Either their inputs are divided, as with sequence parallelism, "
                "and nobody adds the gradients up: name these modules in the plan (SequenceParallel), so that they "
                "become DTensors. Or the ranks see different data or draw different random numbers: give them the same"
            )


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are multiplied by, as ``torch.nn.utils.clip_grads_with_norm_`` has it. Stays on the device."""
    return torch.clamp(max_norm / (norm.to(torch.float32) + 1e-6), max=1.0)
