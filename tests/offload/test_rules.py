"""From torch's groups to the kernel's rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zeroshard.offload.rules import AdamRule, SGDRule, check_has_kernel, moment_names, rule_of


def members() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]


def test_adam_adamw_and_sgd_have_a_kernel() -> None:
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        check_has_kernel(kind(members()))
    check_has_kernel(torch.optim.SGD(members(), momentum=0.9, lr=1))


@pytest.mark.parametrize("kind", ["RMSprop", "Adagrad", "NAdam", "Adamax", "ASGD", "Adadelta", "RAdam", "Rprop"])
def test_an_optimizer_without_a_kernel_is_refused_by_name_with_a_remedy(kind: str) -> None:
    with pytest.raises(
        ValueError, match=rf"offload: {kind} has no host kernel; use torch\.optim\.AdamW.*leave offload="
    ):
        check_has_kernel(getattr(torch.optim, kind)(members()))


def test_a_subclass_may_do_anything_so_it_is_refused() -> None:
    class Mine(torch.optim.AdamW):
        pass

    with pytest.raises(ValueError, match="Mine has no host kernel"):
        check_has_kernel(Mine(members()))


def test_amsgrad_is_refused_also_in_one_group() -> None:
    one, other = members()
    with pytest.raises(ValueError, match="amsgrad=True has no host kernel; leave it out"):
        check_has_kernel(torch.optim.AdamW([{"params": [one]}, {"params": [other], "amsgrad": True}]))


def test_groups_of_sgd_with_and_without_momentum_are_refused() -> None:
    one, other = members()
    with pytest.raises(ValueError, match="some SGD groups have momentum and some have none; give all"):
        check_has_kernel(torch.optim.SGD([{"params": [one]}, {"params": [other], "momentum": 0.9}], lr=1))


def test_moments_have_the_names_that_torch_gives_them() -> None:
    gradient = torch.ones(2)
    cases: list[tuple[Any, tuple[str, ...]]] = [
        (torch.optim.AdamW, ("exp_avg", "exp_avg_sq")),
        (torch.optim.Adam, ("exp_avg", "exp_avg_sq")),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ("momentum_buffer",)),
        (lambda p: torch.optim.SGD(p, lr=0.1), ()),
    ]
    for make, names in cases:
        parameter = nn.Parameter(torch.ones(2))
        optimizer = make([parameter])
        parameter.grad = gradient.clone()
        optimizer.step()
        found = [name for name, v in optimizer.state[parameter].items() if v is not None and name != "step"]
        assert tuple(found) == names == moment_names(optimizer)


def test_a_rule_has_the_groups_values_not_the_defaults_and_does_not_follow_later_changes() -> None:
    one, other = members()
    optimizer = torch.optim.AdamW(
        [{"params": [one], "lr": 0.5, "betas": (0.1, 0.2)}, {"params": [other], "maximize": True}], eps=1e-3
    )
    group = optimizer.param_groups[0]
    rule = rule_of(optimizer, group, 7)
    group["lr"], group["weight_decay"] = 9.0, 9.0
    assert rule == AdamRule(
        lr=0.5, beta1=0.1, beta2=0.2, eps=1e-3, weight_decay=0.01, decoupled=True, maximize=False, step=7
    )
    assert rule_of(optimizer, optimizer.param_groups[1], 7).maximize


def test_a_learning_rate_in_a_tensor_is_read_at_once() -> None:
    lr = torch.tensor(0.25)
    optimizer = torch.optim.AdamW(members(), lr=lr, foreach=False)
    rule = rule_of(optimizer, optimizer.param_groups[0], 1)
    lr.fill_(5)
    assert rule.lr == 0.25


def test_weight_decay_is_decoupled_in_adamw_and_where_adam_is_told_so() -> None:
    for optimizer, decoupled in (
        (torch.optim.AdamW(members()), True),
        (torch.optim.Adam(members()), False),
        (torch.optim.Adam(members(), decoupled_weight_decay=True), True),
    ):
        rule = rule_of(optimizer, optimizer.param_groups[0], 1)
        assert isinstance(rule, AdamRule)
        assert rule.decoupled is decoupled


def test_a_rule_of_sgd_has_the_groups_values_and_the_steps_number() -> None:
    optimizer = torch.optim.SGD(members(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.5)
    for step in (1, 2):
        assert rule_of(optimizer, optimizer.param_groups[0], step) == SGDRule(
            lr=0.1,
            momentum=0.9,
            dampening=0.0,
            nesterov=True,
            weight_decay=0.5,
            maximize=False,
            step=step,
        )
