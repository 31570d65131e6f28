"""Memory of a device by kind, and the parts of a step in which it differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum


class Phase(Enum):
    """Parts of a step."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the device, by kind."""

    parameters: int = 0
    """At rest."""
    gradients: int = 0
    """In the parameters' precision: at rest, under way to other ranks or to the host."""
    accumulators: int = 0
    """Gradients of several micro-batches, in fp32."""
    optimizer_states: int = 0
    """Masters and moments."""
    buffers: int = 0
    """Of the model."""
    activations: int = 0
    gathered: int = 0
    """Whole parameters of units in use, where parameters rest as shards."""
    temporary: int = 0
    """The update's batch, gradients being collected, workspaces."""

    def with_more(self, more: Mapping[str, int]) -> DeviceMemory:
        """And so many bytes beside it, by kind."""
        return DeviceMemory(**{kind: getattr(self, kind) + more.get(kind, 0) for kind in KINDS})

    @property
    def total(self) -> int:
        return sum(getattr(self, kind) for kind in KINDS)

    @property
    def model_states(self) -> int:
        """What the papers' formulas count."""
        return self.parameters + self.gradients + self.optimizer_states


KINDS = tuple(entry.name for entry in fields(DeviceMemory))
