"""The global gradient norm, and the factor that clips gradients to it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.fabric import DisagreementError, Fabric
from ..states.flat import Flat
from ..system import compat

LARGEST_DIFFERENCE = 1e-2
"""The largest relative difference of gradients that should be equal. Kernels may add in no fixed order, and round."""


def global_norm(flats: list[Flat], fabric: Fabric) -> Tensor:
    """The 2-norm of the whole model's averaged gradients, an fp64 scalar on the device.

    Each rank sums the squares of its own shards. The partial sums are added in rank order, so that all stages and all
    ranks get the same bits. Parameters that every model-parallel rank has whole count on the first of these ranks.
    """
    if fabric.model.rank > 0:
        flats = [flat for flat in flats if flat.divided]
    for flat in flats:
        flat.home.unify_factors()
    found = local_norms(flats)
    if not found:
        mine = torch.zeros((), dtype=torch.float64, device=fabric.device)
    else:
        norms = torch.stack(list(found.values()))
        factors = [flat.home.factor() for flat in found]
        if any(factor is not None for factor in factors):
            one = torch.ones((), device=fabric.device)
            norms = norms * torch.stack([one if factor is None else factor for factor in factors])
        mine = norms.square().sum()
    return fabric.sum_in_order(mine).sqrt()


def local_norms(flats: list[Flat]) -> dict[Flat, Tensor]:
    """The norm of each flat's averaged gradient, of the part on this rank. Flats without gradient are left out."""
    on_device = {flat: part for flat in flats if (part := flat.home.counted()) is not None}
    found = dict(zip(on_device, compat.norms(list(on_device.values()), torch.float64), strict=True))
    for flat in flats:
        if flat not in found and (norm := flat.home.norm()) is not None:
            found[flat] = norm
    return {flat: found[flat] for flat in flats if flat in found}


def check_equal_gradients(flats: list[Flat], fabric: Fabric) -> None:
    """Raises if parameters that every tensor-parallel rank has whole have different gradients on these ranks.

    Their values would drift apart. The check waits for the device, so it runs only in the first step and in the first
    step after a load. It does not see gradients that are on the host by then.
    """
    parts = {flat: part for flat in flats if not flat.divided and (part := flat.home.counted()) is not None}
    if fabric.model.world == 1 or fabric.backend == "fake" or not parts:
        return
    norms = fabric.model.gather_small(torch.stack(compat.norms(list(parts.values()), torch.float64)))
    apart = norms.amax(0) - norms.amin(0) > LARGEST_DIFFERENCE * norms.amax(0)
    for flat, differs in zip(parts, apart.tolist(), strict=True):
        if differs:
            raise DisagreementError(
                f"the gradients of {flat.layout.slots[0].name!r} and its neighbours, which every tensor-parallel rank "
                "has whole, differ among these ranks. Either their inputs are divided, as with sequence parallelism, "
                "and nobody adds the gradients up: name these modules in the plan (SequenceParallel), so that they "
                "become DTensors. Or the ranks see different data or draw different random numbers: give them the same"
            )


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor for gradients, as in ``torch.nn.utils.clip_grads_with_norm_``. It stays on the device."""
    return torch.clamp(max_norm / (norm.to(torch.float32) + 1e-6), max=1.0)
