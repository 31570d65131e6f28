"""Memory of a device by kind, and the phases of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum


class Phase(Enum):
    """A part of a step with its own use of memory, or the start of the job."""

    START = "shard()"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the device, by kind."""

    parameters: int = 0
    """Parameters at rest."""
    gradients: int = 0
    """Gradients in the parameters' precision: at rest, or on the way to other ranks or to the host."""
    accumulators: int = 0
    """Sums of the gradients of several micro-batches, in fp32."""
    optimizer_states: int = 0
    """Masters and moments."""
    buffers: int = 0
    """Buffers of the model."""
    activations: int = 0
    gathered: int = 0
    """Whole parameters of units in use, if parameters are shards at rest."""
    temporary: int = 0
    """Temporaries of the update and of collecting gradients, and workspaces."""

    def with_more(self, more: Mapping[str, int]) -> DeviceMemory:
        """This memory and some more bytes, by kind."""
        return DeviceMemory(**{kind: getattr(self, kind) + more.get(kind, 0) for kind in KINDS})

    @property
    def total(self) -> int:
        return sum(getattr(self, kind) for kind in KINDS)

    @property
    def model_states(self) -> int:
        """The kinds that the papers' formulas count."""
        return self.parameters + self.gradients + self.optimizer_states


KINDS = tuple(entry.name for entry in fields(DeviceMemory))
KIND_TITLES = {kind: kind for kind in KINDS} | {
    "gathered": "gathered parameters",
    "optimizer_states": "optimizer states",
}
"""The kinds as messages and tables write them."""
