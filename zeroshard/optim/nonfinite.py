"""NaN and inf: found in the step where they appear, traced to a unit. They never reach the states.

The search looks at two places. In forward it looks at every unit's output, and finds the first unit whose output is not
finite. After backward it looks at the averaged gradients. Their global norm is not finite if any element is not. The
first flat with such an element, in the order of backward, is the flat where the NaN or inf began. Either all ranks
leave the step out or none does, so the ranks agree on the result.

The search costs a pass over each unit's output and a pass over the gradients (which clipping makes anyway), and
``step()`` waits for the device. Therefore the search is an option.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal

import torch
from torch import Tensor

from ..comm.fabric import Fabric
from ..comm.parallel import local
from ..states.buffers import Buffers
from ..states.flat import Flat
from ..states.unit import Unit
from ..system.structures import tensors_in
from .norm import local_norms

Policy = Literal["skip", "stop", "raise"]


class NonFiniteError(RuntimeError):
    """A loss or a gradient was NaN or infinite. The message names step, unit and rank. That step changed no state."""


class Faults:
    """The search for NaN and inf in one model, and the policy when they are found."""

    def __init__(self, policy: Policy | None, fabric: Fabric, buffers: Buffers) -> None:
        self._policy, self._fabric, self._buffers = policy, fabric, buffers
        self.watching = policy is not None
        self._outputs: list[tuple[str, Tensor]] = []
        """Titles of units in the order of their outputs. For each: whether the output was finite, on the device."""
        self.stop_reason: str | None = None
        """Why training was stopped, with the policy "stop"."""
        self._fault: str | None = None
        self._underway = False
        """A forward that is trained on has begun since the last step."""
        if self.watching:
            buffers.remember()

    def states_loaded(self) -> None:
        """Called when a checkpoint was loaded. A step that is left out goes back to the loaded buffers."""
        self._outputs.clear()
        self.stop_reason = None
        if self.watching:
            self._buffers.remember()

    def begin(self) -> None:
        """Called when a forward begins and no gradients wait for a step. Outputs of earlier forwards do not count.

        The first forward with gradients begins the step: a step that is left out goes back to the buffers of this
        moment. A second forward before any backward may belong to the same step.
        """
        self._outputs.clear()
        if self.watching and torch.is_grad_enabled() and not self._underway:
            self._underway = True
            self._buffers.remember()

    def begin_backward(self) -> None:
        """Called when a backward begins. If its gradients are dropped, the next forward begins a new step."""
        self._underway = False

    def look_at(self, unit: Unit, output: Any) -> None:
        """Looks at a unit's output in a forward with gradients. The root's output is the model's, mostly the loss."""
        if self.watching and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.is_floating_point() and not tensor.is_sparse and tensor.numel():
                    self._outputs.append((unit.title, torch.isfinite(local(tensor.detach())).all()))

    def check_not_stopped(self) -> None:
        if self.stop_reason is not None:
            raise NonFiniteError(f"training was stopped: {self.stop_reason}")

    def found(self, step: int, norm: Tensor, order: list[Flat], overflow_is_normal: bool) -> bool:
        """Whether anything was not finite in a step, on any rank. Collective. Waits for the device."""
        self._fault = self._find(step, norm, order, overflow_is_normal)
        if self._fault is not None:
            self._buffers.recall()  # the bad forward may have written to buffers
        return self._fault is not None

    def _find(self, step: int, norm: Tensor, order: list[Flat], overflow_is_normal: bool) -> str | None:
        """A sentence that names what was not finite, the same on all ranks; None if all was finite."""
        outputs, self._outputs = self._outputs, []
        finite = torch.stack([flag for _, flag in outputs]).tolist() if outputs else []
        forward = next((title for (title, _), good in zip(outputs, finite, strict=True) if not good), None)
        gradients = not math.isfinite(float(norm)) and not overflow_is_normal
        if not self._fabric.maximum([int(forward is not None or gradients)])[0]:
            return None
        backward = [flat.label for flat in order if not _is_finite(flat)] if gradients else []
        everybody = self._fabric.gather_objects((forward, backward))
        for rank, (title, _) in enumerate(everybody):
            if title is not None:
                return f"step {step}: the output of unit {title!r} is not finite on rank {rank}"
        bad = {label for _, labels in everybody for label in labels}
        names = [flat.label for flat in order if flat.label in bad]
        first = f"unit {names[0]!r}" if names else "a unit"
        others = f" (and of {len(names) - 1} that come after it in backward)" if len(names) > 1 else ""
        return f"step {step}: the gradients of {first} are not finite{others}"

    def act(self) -> None:
        """Called at the end of a step. Does what the policy asks for, if something was not finite."""
        found, self._fault = self._fault, None
        self._underway = False
        if self.watching:
            self._buffers.remember()
        if found is None:
            return
        left_out = f"{found}; the step was left out and the states are as before"
        if self._policy == "raise":
            raise NonFiniteError(left_out)
        if self._policy == "stop":
            self.stop_reason = found
        if self._fabric.rank == 0:
            warnings.warn(left_out, stacklevel=4)


def _is_finite(flat: Flat) -> bool:
    return all(math.isfinite(float(norm)) for norm in local_norms([flat]).values())
