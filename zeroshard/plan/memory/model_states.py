"""Memory of optimizer states, known without a model: tensors a parameter, and the share of a device for all states."""

from __future__ import annotations

from statistics import fmean

import torch

from ...config.optimizers import SUPPORTED

STATES_SHARE = 0.7
"""Model states may take this share of a device; the rest is for activations and buffers, where these are not known."""


def state_tensors(optimizer: torch.optim.Optimizer) -> float:
    """Tensors of a parameter's size that an optimizer has, the mean of its groups. Unknown ones count as Adam."""
    states = SUPPORTED.get(type(optimizer), SUPPORTED[torch.optim.Adam])
    return fmean(len(states.moments(group)) for group in optimizer.param_groups)
