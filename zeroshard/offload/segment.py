"""What the host optimizer works on: ranges of parameters, and the rules that update them.

The packed forms at the end are the structures of `native/abi.h`, byte for byte.
"""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

GRADIENTS: Final = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""Kinds of elements in native/abi.h. Parameters and moments use the same numbers."""
REMAINDER: Final = 4
ABSENT: Final = 0


@dataclass(frozen=True)
class AdamRule:
    """`torch.optim.Adam`, or `AdamW` where the weight decay is decoupled. No amsgrad."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    step: int
    """This step's number, 1 for the first."""


@dataclass(frozen=True)
class SGDRule:
    """`torch.optim.SGD`."""

    lr: float
    momentum: float
    dampening: float
    nesterov: bool
    weight_decay: float
    maximize: bool
    first: bool
    """Whether the momentum buffer holds nothing yet."""
    step: int = 0
    """Only for the stochastic rounding of a bf16 buffer: another number each step."""


Rule = AdamRule | SGDRule


@dataclass(frozen=True)
class Segment:
    """A contiguous range of one parameter. All tensors are 1-D, contiguous, on the CPU and equally long."""

    gradient: Tensor
    """bf16, fp16 or fp32."""
    master: Tensor
    """fp32; or int16, the remainders of a split master whose high half is `parameter`."""
    parameter: Tensor | None
    """Where the 16-bit parameter is written, over the gradient if that is the same memory. None: fp32 has no copy.

    With a split master it is bf16, and read as well.
    """
    moments: tuple[Tensor, ...]
    """Adam: exp_avg and exp_avg_sq. SGD: the momentum buffer, or none. fp32, or bf16 with stochastic rounding."""
    rule: Rule | None
    """Hyper-parameters by value; None in a batch, which is given them step by step."""
    key: int
    """64 bits that identify the parameter, for stochastic rounding."""
    start: int
    """Index of the first element within the parameter, likewise."""

    @property
    def is_split(self) -> bool:
        """Whether the master is the bf16 parameter and a 16-bit remainder."""
        return self.master.dtype is torch.int16

    def validate(self) -> None:
        """Refuse what the kernel would read wrongly."""
        length = self.gradient.numel()
        for name, tensor in self._tensors():
            _require_flat(name, tensor)
            if tensor.numel() != length:
                raise ValueError(f"{name} has {tensor.numel()} elements, but the gradient has {length}")
        _require_dtype("gradient", self.gradient, *GRADIENTS)
        _require_dtype("master", self.master, torch.float32, torch.int16)
        if len(self.moments) > 2:
            raise ValueError(f"moments are {len(self.moments)} tensors; Adam has two, SGD one or none")
        for index, moment in enumerate(self.moments):
            _require_dtype(f"moments[{index}]", moment, torch.float32, torch.bfloat16)
        if self.is_split and (self.parameter is None or self.parameter.dtype is not torch.bfloat16):
            raise ValueError(
                "a split master (int16 remainders) needs a bf16 parameter as its high half; keep an fp32 master for "
                f"{'fp32' if self.parameter is None else self.parameter.dtype} parameters"
            )
        if self.parameter is not None:
            _require_dtype("parameter", self.parameter, torch.bfloat16, torch.float16)
        if self.start < 0:
            raise ValueError(f"start={self.start} must be at least 0")
        self._require_disjoint()

    def _tensors(self) -> list[tuple[str, Tensor]]:
        named = [("gradient", self.gradient), ("master", self.master)]
        if self.parameter is not None:
            named.append(("parameter", self.parameter))
        return named + [(f"moments[{index}]", moment) for index, moment in enumerate(self.moments)]

    def _require_disjoint(self) -> None:
        """Elements are read and written in any order, so memory is shared element for element or not at all."""
        spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in self._tensors())
        for (begin, end, name), (other_begin, other_end, other) in itertools.pairwise(spans):
            if other_begin < end:
                over_its_slot = {name, other} == {"gradient", "parameter"} and (begin, end) == (other_begin, other_end)
                if not over_its_slot or self.is_split:
                    raise ValueError(
                        f"{name} and {other} overlap; only a 16-bit parameter with an fp32 master may do so, "
                        "exactly over its gradient"
                    )


def _require_flat(name: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; the host optimizer works on CPU tensors")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} of shape {tuple(tensor.shape)} must be 1-D and contiguous; pass a flat view")


def _require_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} is {tensor.dtype}, must be one of {', '.join(map(str, allowed))}")


def require_values(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that `accumulate` and `square_sum` cannot read."""
    _require_flat(name, tensor)
    _require_dtype(name, tensor, *GRADIENTS)


# -- as the native code reads them ------------------------------------------------------------------------------------

_SEGMENT: Final = struct.Struct("=5Q2qQ5i4x")
_RULE: Final = struct.Struct("=2iq8f")
_MAXIMIZE, _DECAY_GRADIENT, _LERP_FROM_END, _NESTEROV, _FIRST = 1, 2, 4, 8, 16
_ADAM, _SGD = 0, 1


def pack_segment(segment: Segment) -> bytes:
    """`struct Segment` of native/abi.h."""
    parameter = segment.parameter
    moments = [(moment.data_ptr(), GRADIENTS[moment.dtype]) for moment in segment.moments]
    moments += [(0, ABSENT)] * (2 - len(moments))
    return _SEGMENT.pack(
        segment.gradient.data_ptr(),
        segment.master.data_ptr(),
        0 if parameter is None else parameter.data_ptr(),
        *(address for address, _ in moments),
        segment.gradient.numel(),
        segment.start,
        segment.key % 2**64,
        GRADIENTS[segment.gradient.dtype],
        REMAINDER if segment.is_split else GRADIENTS[segment.master.dtype],
        ABSENT if parameter is None else GRADIENTS[parameter.dtype],
        *(kind for _, kind in moments),
    )


@lru_cache(maxsize=1024)
def pack_rule(rule: Rule, moments: int) -> bytes:
    """`struct Rule` of native/abi.h: constants computed in double as torch does, and rounded once to fp32."""
    flags = _MAXIMIZE if rule.maximize else 0
    if isinstance(rule, AdamRule):
        if moments != 2:
            raise ValueError(f"Adam needs two moments, this segment has {moments}")
        if rule.step < 1:
            raise ValueError(f"step={rule.step} must be at least 1: it is the number of this step")
        if rule.weight_decay != 0 and not rule.decoupled:
            flags |= _DECAY_GRADIENT
        if 1 - rule.beta1 >= 0.5:
            flags |= _LERP_FROM_END
        return _RULE.pack(
            _ADAM,
            flags,
            rule.step,
            1 - rule.lr * rule.weight_decay if rule.decoupled else 1.0,
            rule.weight_decay,
            1 - rule.beta1,
            rule.beta2,
            1 - rule.beta2,
            math.sqrt(1 - rule.beta2**rule.step),
            rule.eps,
            -rule.lr / (1 - rule.beta1**rule.step),
        )
    if moments != (rule.momentum != 0):
        raise ValueError(
            f"SGD with momentum={rule.momentum} needs {int(rule.momentum != 0)} moments, this segment has {moments}"
        )
    flags |= _DECAY_GRADIENT if rule.weight_decay != 0 else 0
    flags |= _NESTEROV if rule.nesterov else 0
    flags |= _FIRST if rule.first else 0
    constants = (1.0, rule.weight_decay, 1 - rule.dampening, rule.momentum, 0.0, 0.0, 0.0, -rule.lr)
    return _RULE.pack(_SGD, flags, rule.step, *constants)
