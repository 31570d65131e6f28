"""Which optimizers can be sharded: over this model's parameters, and each element by itself."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Optimizers of torch that update an element from its own value, gradient and state alone."""


def check_elementwise(optimizer: torch.optim.Optimizer, vouched: bool) -> None:
    """Only an optimizer that treats each element by itself gives the same result on shards."""
    kind = type(optimizer)
    if kind in ELEMENTWISE:
        if vouched:
            raise ValueError(f"elementwise=True has no effect: {kind.__name__} is known to be; leave it out")
        return
    if kind.__module__.startswith("torch.optim"):
        raise ValueError(
            f"{kind.__name__} looks at more than one element at a time (a whole matrix, or the whole model), so it "
            f"cannot update shards; use one of {', '.join(sorted(known.__name__ for known in ELEMENTWISE))}"
        )
    if not vouched:
        raise ValueError(
            f"zeroshard does not know whether {kind.__name__} updates each element by itself, which sharding needs; "
            "if it does, say so with elementwise=True"
        )


def check_covers(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """The optimizer must be over this model's parameters: all trainable ones, and no others."""
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


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return repr(names[0]) if len(names) == 1 else f"{names[0]!r} (and {len(names) - 1} more)"
