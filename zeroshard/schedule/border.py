"""Casts and the loss scale, at the border of the model.

The loss scale is in effect only inside the model. Gradients are multiplied by it where backward enters the model. They
are divided by it where backward leaves the model, for layers that the user has put before the model.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config.options import Precision
from ..optim.loss_scale import LossScaler
from ..system.hook import Hook
from ..system.structures import cast_floating, map_tensors


class Border:
    """Where tensors enter and leave the model."""

    def __init__(self, precision: Precision, scaler: LossScaler | None) -> None:
        self._precision, self._scaler = precision, scaler

    def enter(self, inputs: Any) -> Any:
        """The inputs of the model, in the dtype of its parameters if the user asked for that."""
        if self._scaler is not None and torch.is_grad_enabled():
            inputs = map_tensors(partial(_unscale_at, self._scaler), inputs)
        if self._precision.parameters is not None and self._precision.cast_inputs:
            inputs = cast_floating(inputs, self._precision.parameters)
        return inputs

    def leave(self, output: Any) -> Any:
        """The output of the model, in the dtype that the user asked for."""
        if self._precision.output is not None:
            output = cast_floating(output, self._precision.output)
        if self._scaler is not None and torch.is_grad_enabled():
            # Outputs become aliases, which nothing in the model uses. So a gradient is scaled once, even if one output
            # is computed from another output.
            output = map_tensors(lambda tensor: tensor if tensor.grad_fn is None else tensor.view_as(tensor), output)
        return output

    def scale(self, gradient: Tensor) -> Tensor | None:
        """The scaled gradient of an output. None leaves the gradient as it is."""
        return None if self._scaler is None else gradient * self._scaler.scale


def _unscale_at(scaler: LossScaler, tensor: Tensor) -> Tensor:
    """An alias of a tensor. The gradient that goes back through the alias is divided by the loss scale."""
    if not tensor.requires_grad:
        return tensor
    alias = tensor.view_as(tensor)
    alias.register_hook(Hook(lambda gradient: gradient / scaler.scale))
    return alias
