"""The time of collectives in rings: latency · steps + bytes / bandwidth.

If a group spans nodes, the links between nodes bound it. The group shares these links with the other groups of its
nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..machine.profile import Machine
from .timeline import Resource


@dataclass(frozen=True)
class CollectiveRing:
    """The ranks of a collective, and the links that they use."""

    resource: Resource
    ranks: int
    bandwidth: float
    """Bytes a second in each direction."""
    latency: float
    """Seconds of one pass around the ring, for messages of any size."""

    def seconds(self, size: float, passes: int = 1) -> float:
        """Seconds of an all-gather or reduce-scatter of ``size`` bytes in all. An all-reduce has two passes."""
        if self.ranks == 1:
            return 0.0
        return passes * (self.latency + size * (self.ranks - 1) / self.ranks / self.bandwidth)


def ring(machine: Machine, ranks: int, stride: int) -> CollectiveRing:
    """The ring of every ``stride``-th device.

    The stride is 1 for model-parallel ranks, and the degree of model parallelism for data-parallel ranks.
    """
    a_node = machine.devices_per_node
    here = max(1, a_node // stride)
    if ranks <= here:
        return CollectiveRing(
            Resource.NODE_LINKS, ranks, machine.inside.bandwidth, (ranks - 1) * machine.inside.latency
        )
    groups = min(stride, a_node)
    nodes = -(-ranks // here)
    latency = (nodes - 1) * machine.between.latency + (here - 1) * machine.inside.latency
    bandwidth = min(machine.inside.bandwidth, machine.between.bandwidth / groups)
    return CollectiveRing(Resource.NETWORK, ranks, bandwidth, latency)
