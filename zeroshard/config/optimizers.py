"""The optimizers that can be sharded: the one table of them, and the checks of an optimizer that a user passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""Names of states that belong to a parameter as a whole. Names decide: for a scalar parameter, shapes say nothing."""


NOT_NEGATIVE = frozenset({"exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "sum", "step_size"})
"""Names of states without an element below 0: averages and sums of squares, largest absolute values, step sizes."""
LARGEST_SETTING = torch.finfo(torch.float32).max
"""torch cannot multiply a tensor of fp32 by a larger number."""


class Bounds(NamedTuple):
    """Which numbers a setting may have. Both limits belong to the allowed numbers, unless ``below`` is True."""

    least: float
    most: float
    below: bool = False

    def allow(self, value: float) -> bool:
        """True if a setting may have this number."""
        return self.least <= value <= self.most and not (self.below and value == self.most)

    def __str__(self) -> str:
        """The bounds in words.

        >>> str(SETTINGS["betas"])
        'a number from 0 to below 1'
        """
        if self.most >= LARGEST_SETTING:
            return "a finite number" if self.least < 0 else "a finite number, 0 or more"
        return f"a number from {self.least:g} to {'below ' * self.below}{self.most:g}"


FINITE = Bounds(-LARGEST_SETTING, LARGEST_SETTING)
AMOUNT = Bounds(0, LARGEST_SETTING)
SHARE = Bounds(0, 1)

SETTINGS: Mapping[str, Bounds] = {
    **dict.fromkeys(("lr", "lr_decay", "eps", "weight_decay", "momentum", "momentum_decay"), AMOUNT),
    "initial_accumulator_value": AMOUNT,
    "betas": Bounds(0, 1, below=True),
    "rho": SHARE,
    "etas": AMOUNT,
    "step_sizes": Bounds(0, math.inf),
    "t0": Bounds(-math.inf, math.inf),
}
"""The numbers that a setting of torch's optimizers may have, as torch demands them of a new optimizer. Other settings
may have any finite number. A setting of several numbers has the bounds for each of them."""
OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "swa_lr"})
"""Settings that torch's schedulers add to a group. They have the bounds of ``lr``."""


class States(NamedTuple):
    """The states that one of torch's optimizers has for a parameter after its first step, by torch's names."""

    always: tuple[str, ...]
    by_setting: Mapping[str, str] = {}
    """Settings, and for each the state that exists only if the setting is neither 0 nor False."""
    on_host: bool = False
    """True if offload has a kernel for this optimizer."""
    bounds: Mapping[str, Bounds] = {}
    """Settings whose bounds are not those of ``SETTINGS``."""

    def bounds_of(self, setting: str) -> Bounds:
        """The numbers that a setting may have."""
        return self.bounds.get(setting) or SETTINGS.get("lr" if setting in OF_SCHEDULERS else setting, FINITE)

    def under(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the states under these settings of a group."""
        return *self.always, *(name for setting, name in self.by_setting.items() if settings.get(setting))

    def moments(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the states that have one element for each element of the parameter.

        >>> SUPPORTED[torch.optim.AdamW].moments({"amsgrad": False})
        ('exp_avg', 'exp_avg_sq')
        """
        return tuple(name for name in self.under(settings) if name not in SCALARS)


_ADAM = States(("step", "exp_avg", "exp_avg_sq"), {"amsgrad": "max_exp_avg_sq"}, on_host=True)

SUPPORTED: Mapping[type[torch.optim.Optimizer], States] = {
    torch.optim.ASGD: States(("step", "eta", "mu", "ax")),
    torch.optim.Adadelta: States(("step", "square_avg", "acc_delta")),
    torch.optim.Adagrad: States(("step", "sum")),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.Adamax: States(("step", "exp_avg", "exp_inf")),
    torch.optim.NAdam: States(("step", "mu_product", "exp_avg", "exp_avg_sq")),
    torch.optim.RAdam: States(("step", "exp_avg", "exp_avg_sq")),
    torch.optim.RMSprop: States(
        ("step", "square_avg"),
        {"momentum": "momentum_buffer", "centered": "grad_avg"},
        bounds={"alpha": SHARE},
    ),
    torch.optim.Rprop: States(("step", "prev", "step_size")),
    torch.optim.SGD: States((), {"momentum": "momentum_buffer"}, on_host=True),
}
"""The optimizers of torch that update an element from its own value, gradient and state alone."""


def check_elementwise(optimizer: torch.optim.Optimizer, vouched: bool) -> None:
    """Refuses an optimizer that looks at several elements at once: on shards its results would differ.

    ``vouched``: the user promises that the optimizer updates each element by itself.
    """
    kind = type(optimizer)
    if kind in SUPPORTED:
        if vouched:
            raise ValueError(f"elementwise=True has no effect: {kind.__name__} is known to be; leave it out")
        return
    if kind.__module__.startswith("torch.optim"):
        raise ValueError(
            f"{kind.__name__} looks at more than one element at a time (a whole matrix, or the whole model), so it "
            f"cannot update shards; use one of {', '.join(sorted(known.__name__ for known in SUPPORTED))}"
        )
    if not vouched:
        raise ValueError(
            f"zeroshard does not know whether {kind.__name__} updates each element by itself, which sharding needs; "
            "if it does, say so with elementwise=True"
        )


def check_covers(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuses an optimizer that lacks a trainable parameter of this model, or has other parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    covered = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    foreign = sum(key not in names for key in covered)
    if foreign:
        raise ValueError(
            f"{foreign} of the optimizer's {len(covered)} parameters are not the model's; build the optimizer from "
            "model.parameters() of the model you shard (and after moving it, if you move it)"
        )
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in covered]
    if missing:
        raise ValueError(
            f"{_some(missing)} requires a gradient but is in no group of the optimizer; add it to the optimizer or "
            "freeze it with requires_grad_(False)"
        )


def _some(names: Sequence[str]) -> str:
    return repr(names[0]) if len(names) == 1 else f"{names[0]!r} (and {len(names) - 1} more)"
