"""What an update does to a parameter: a rule, made from the settings of a torch optimizer.

``check_has_kernel`` refuses optimizers that the host cannot run. ``rule_of`` copies the hyper-parameters of one group
by value. ``pack_rule`` writes a rule as the native code reads it (``struct Rule`` of ``native/abi.h``).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch

from ..config.optimizers import SUPPORTED


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
    step: int
    """This step's number. In step 1 the momentum buffer has no value yet."""


Rule = AdamRule | SGDRule


def check_has_kernel(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that the host cannot run."""
    kind = type(optimizer)
    if kind not in SUPPORTED or not SUPPORTED[kind].on_host:
        raise ValueError(
            f"offload: {kind.__name__} has no host kernel; use torch.optim.AdamW, Adam or SGD, or leave offload= out"
        )
    for group in optimizer.param_groups:
        if group.get("amsgrad", False):
            raise ValueError("offload: amsgrad=True has no host kernel; leave it out, or leave offload= out")
    momenta = {bool(group["momentum"]) for group in optimizer.param_groups} if kind is torch.optim.SGD else set()
    if len(momenta) > 1:
        raise ValueError("offload: some SGD groups have momentum and some have none; give all of them one or none")


def moment_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Torch's names of the optimizer states that have the parameter's shape."""
    return SUPPORTED[type(optimizer)].moments(optimizer.param_groups[0])


def rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any], step: int) -> Rule:
    """The rule of one group, for a parameter in its step of this number. Later changes of the group do not count."""
    if type(optimizer) is not torch.optim.SGD:
        beta1, beta2 = group["betas"]
        return AdamRule(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=type(optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay", False)),
            maximize=bool(group["maximize"]),
            step=step,
        )
    return SGDRule(
        lr=float(group["lr"]),
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]),
        nesterov=bool(group["nesterov"]),
        weight_decay=float(group["weight_decay"]),
        maximize=bool(group["maximize"]),
        step=step,
    )


# -- the packed form, as native/abi.h declares it ----------------------------------------------------------------------

_RULE: Final = struct.Struct("=2iq8f")
_ADAM, _SGD = 0, 1
_MAXIMIZE, _DECAY_GRADIENT, _LERP_FROM_END, _NESTEROV, _FIRST = 1, 2, 4, 8, 16


@lru_cache(maxsize=1024)
def pack_rule(rule: Rule, moments: int) -> bytes:
    """A rule for a segment with this many moments.

    Constants are computed in double precision, as torch does, and rounded to fp32 once. The number of moments is
    checked because the native code reads as many as the rule needs.
    """
    flags = _MAXIMIZE if rule.maximize else 0
    if isinstance(rule, AdamRule):
        if moments != 2:
            raise ValueError(f"Adam needs two moments, this segment has {moments}")
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
    flags |= _FIRST if rule.step == 1 else 0
    constants = (1.0, rule.weight_decay, 1 - rule.dampening, rule.momentum, 0.0, 0.0, 0.0, -rule.lr)
    return _RULE.pack(_SGD, flags, rule.step, *constants)
