"""A reduce under way: the average of one flat's gradients over all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..comm.fabric import Fabric
from ..comm.lane import Done, Pending
from ..config.table import Extent

if TYPE_CHECKING:
    from .flat import Flat


@dataclass(frozen=True)
class Reduction:
    """A reduce under way."""

    pending: Pending
    local: Tensor
    """The collective reads this memory, so it is referenced until the reduce is over."""
    out: Tensor
    complete: bool
    """Whether every parameter had its gradient when the reduce began."""

    @classmethod
    def start(cls, flat: Flat, fabric: Fabric, local: Tensor, *, complete: bool) -> Reduction:
        """Starts averaging a whole flat of gradients. ``out`` then gets the range that this rank stores."""
        if flat.alone:
            return cls(Done(), local, local, complete)
        table, own, lane = flat.table, flat.own, fabric.reduces
        pending: Pending
        if table.optimizer.extent is Extent.WHOLE:
            out, pending = local, Done() if lane.group is None else lane.all_reduce(local, flat.label)
        else:
            in_place = table.gradients.extent is Extent.WHOLE
            out = local[own.start : own.stop] if in_place else local.new_empty(own.numel)
            pending = lane.reduce_scatter(local, out, flat.label)
        return cls(_average_between_replicas(pending, out, fabric, flat.label), local, out, complete)


def _average_between_replicas(inside: Pending, out: Tensor, fabric: Fabric, label: str) -> Pending:
    lane = fabric.replicas
    if lane.group is None:
        return inside
    if lane.stream is None:
        inside.wait()  # messages are awaited on the host; on a stream the order is enough
    return lane.all_reduce(out, label)
