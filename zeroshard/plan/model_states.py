"""The papers' memory formula for model states, for any stage, dtype and optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import torch

from ..config.offload import Offload
from ..config.table import Extent, state_table

STATES_SHARE = 0.7
"""The share of a device that model states may take if activations and buffers are not known. The rest is for these."""

STATE_TENSORS = {
    torch.optim.ASGD: 1,
    torch.optim.Adadelta: 2,
    torch.optim.Adagrad: 1,
    torch.optim.Adam: 2,
    torch.optim.AdamW: 2,
    torch.optim.Adamax: 2,
    torch.optim.NAdam: 2,
    torch.optim.RAdam: 2,
    torch.optim.RMSprop: 1,
    torch.optim.Rprop: 2,
    torch.optim.SGD: 0,
}
"""State tensors of a parameter's size in each optimizer. Options may add some. Unknown optimizers count as Adam."""


@dataclass(frozen=True)
class ModelStateBytes:
    """Bytes of the model states of a whole model, not yet divided among ranks."""

    parameters: int
    gradients: int
    optimizer_states: int

    def on_device(self, offload: Offload | None) -> ModelStateBytes:
        """The states that stay on the device. The host of each rank has an N-th of the others."""
        if offload is None:
            return self
        stays = 0.0 if offload.host_fraction == "auto" else 1 - offload.host_fraction
        return ModelStateBytes(
            0 if offload.parameters == "cpu" else self.parameters,
            int(stays * self.gradients),
            int(stays * self.optimizer_states),
        )

    def per_rank(self, stage: int, world: int) -> float:
        """Bytes on one rank (ZeRO, section 5): each kind is whole or an N-th, by the table of the stage.

        >>> psi = 7_500_000_000
        >>> [round(ModelStateBytes(2 * psi, 2 * psi, 12 * psi).per_rank(stage, 64) / 1e9, 1) for stage in range(4)]
        [120.0, 31.4, 16.6, 1.9]
        """
        table = state_table(stage, world)

        def share(extent: Extent) -> int:
            return world if extent is Extent.SHARD else 1

        return (
            self.parameters / share(table.parameters.extent)
            + self.gradients / share(table.gradients.extent)
            + self.optimizer_states / share(table.optimizer.extent)
        )


def state_tensors(optimizer: torch.optim.Optimizer) -> float:
    """State tensors of a parameter's size that an optimizer has: the mean over its groups."""
    base = STATE_TENSORS.get(type(optimizer), 2)
    return fmean(base + _extra(group) for group in optimizer.param_groups)


def _extra(group: dict[str, object]) -> int:
    """State tensors that options of a group add."""
    return sum(bool(group.get(option)) for option in ("momentum", "amsgrad", "centered"))
