"""Collectives among the devices of a machine: latency · steps + bytes / bandwidth, in rings.

A group that spans nodes is bound by what its nodes send, which it shares with the other groups of those nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from .machine_profile import Machine
from .timeline import Resource


@dataclass(frozen=True)
class CollectiveRing:
    """The ranks of one collective, and what they share."""

    resource: Resource
    ranks: int
    bandwidth: float
    """Bytes a second each way."""
    latency: float
    """Seconds of one pass around, whatever it moves."""

    def seconds(self, size: float, passes: int = 1) -> float:
        """Of an all-gather or reduce-scatter of ``size`` bytes in all; an all-reduce passes twice."""
        if self.ranks == 1:
            return 0.0
        return passes * (self.latency + size * (self.ranks - 1) / self.ranks / self.bandwidth)


def ring(machine: Machine, ranks: int, stride: int) -> CollectiveRing:
    """A group of every ``stride``-th device: 1 for model parallelism, its degree for data parallelism."""
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
