"""From a torch optimizer's groups to the rules of the host kernel."""

from __future__ import annotations

from typing import Any

import torch

from ..config.optimizers import SUPPORTED
from .segment import AdamRule, Rule, SGDRule


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
    """What torch calls the states that have the parameter's shape."""
    return SUPPORTED[type(optimizer)].moments(optimizer.param_groups[0])


def rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any], step: int) -> Rule:
    """A group's hyper-parameters by value, for a parameter whose step has this number, 1 for the first."""
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
        first=step == 1,
        step=step,
    )
