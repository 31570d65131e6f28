"""DESIGN, invariant 2: how many elements a step communicates, counted in Ψ of the padded flats."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.models import loss_of, net
from tests.ranks import on_ranks


def build(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return zeroshard.shard(model, torch.optim.AdamW(trained), **options)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, micro_batches: int = 1, delay: bool = False
) -> None:
    for micro in range(micro_batches):
        with zeroshard.no_sync(model) if delay and micro < micro_batches - 1 else nullcontext():
            loss_of(model, number * 10 + micro).backward()
    optimizer.step()
    optimizer.zero_grad()


def settled_volume(model: nn.Module, optimizer: torch.optim.Optimizer, **how: Any) -> zeroshard.Stats:
    """The volume of the fourth step. In the first step the order of units is not yet known."""
    for number in range(4):
        step(model, optimizer, number, **how)
    return zeroshard.stats(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_ranks(2)
def test_stages_0_to_2_move_two_psi_and_stage_3_three_less_what_is_kept(precision: str) -> None:
    for stage in (0, 1, 2):
        stats = settled_volume(*build(net(), stage=stage, precision=precision))
        assert stats.volume_elements == 2 * stats.padded_parameters
    stats = settled_volume(*build(net(), stage=3, precision=precision))
    assert 0 < stats.kept_parameters < stats.padded_parameters
    assert stats.volume_elements == 3 * stats.padded_parameters - stats.kept_parameters
    stats = settled_volume(*build(net(), stage=3, precision=precision, keep=()))
    assert stats.kept_parameters == 0
    assert stats.volume_elements == 3 * stats.padded_parameters
    width = {"fp32": 4, "bf16": 2}[precision]
    assert sum(traffic.bytes for traffic in stats.volume.values()) == width * stats.volume_elements


@on_ranks(2)
def test_each_stage_uses_the_collectives_of_the_paper() -> None:
    for stage, kinds in (
        (0, {"all_reduce"}),
        (1, {"reduce_scatter", "all_gather"}),
        (2, {"reduce_scatter", "all_gather"}),
    ):
        stats = settled_volume(*build(net(), stage=stage))
        assert set(stats.volume) == kinds
    stats = settled_volume(*build(net(), stage=3, keep=()))
    assert stats.volume["all_gather"].elements == 2 * stats.padded_parameters
    assert stats.volume["reduce_scatter"].elements == stats.padded_parameters


@on_ranks(3)
def test_the_volume_does_not_depend_on_the_number_of_ranks() -> None:
    stats = settled_volume(*build(net(), stage=3, keep=()))
    assert stats.volume_elements == 3 * stats.padded_parameters


@on_ranks(2)
def test_named_units_are_kept_instead_of_root_and_last() -> None:
    stats = settled_volume(*build(net(), stage=3, keep=["blocks.1"]))
    assert stats.volume_elements == 3 * stats.padded_parameters - stats.kept_parameters
    assert stats.kept_parameters == stats.padded_parameters - settled_rest(stats)


def settled_rest(stats: zeroshard.Stats) -> int:
    """All elements outside blocks.1, computed from the shapes: 4 equal blocks and a root."""
    block = sum(-(-n // 64) * 64 for n in (13, 13, 39 * 13, 39, 39 * 13, 13))
    return stats.padded_parameters - -(-block // 128) * 128


@on_ranks(2)
def test_frozen_parameters_cost_nothing_in_stages_0_to_2_and_only_gathers_in_stage_3() -> None:
    def half_frozen() -> nn.Module:
        model = net()
        for block in model.blocks[:2]:
            block.requires_grad_(False)
        return model

    for stage in (0, 1, 2):
        stats = settled_volume(*build(half_frozen(), stage=stage))
        trained = build(net(), stage=stage)
        frozen_share = stats.padded_parameters - stats.volume_elements // 2
        assert frozen_share == 2 * settled_block(stats)
        assert zeroshard.stats(trained[0]).padded_parameters == stats.padded_parameters
    stats = settled_volume(*build(half_frozen(), stage=3, keep=()))
    assert stats.volume["reduce_scatter"].elements == stats.padded_parameters - 2 * settled_block(stats)
    # The frozen blocks lie between the first layer, which is trained, and the rest, so backward needs them too.
    assert stats.volume["all_gather"].elements == 2 * stats.padded_parameters


def settled_block(stats: zeroshard.Stats) -> int:
    return stats.padded_parameters - settled_rest(stats)


@on_ranks(2)
def test_k_micro_batches_cost_what_design_says_reduced_each_or_delayed() -> None:
    k = 3
    for stage, each, delayed in ((2, k + 1, 2), (3, 3 * k, 2 * k + 1)):
        keep: dict[str, Any] = {"keep": ()} if stage == 3 else {}
        stats = settled_volume(*build(net(), stage=stage, **keep), micro_batches=k)
        assert stats.volume_elements == each * stats.padded_parameters
        stats = settled_volume(*build(net(), stage=stage, **keep), micro_batches=k, delay=True)
        assert stats.volume_elements == delayed * stats.padded_parameters


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_recomputation_adds_no_fourth_psi(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def checkpointed() -> nn.Module:
        model = net()

        def forward(x: torch.Tensor) -> torch.Tensor:
            x = model.first(x)
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return model.last(x)

        model.forward = forward  # type: ignore[method-assign]
        return model

    plain = build(net(), stage=2)
    for number in range(4):
        step(*plain, number)
    for units in (None, ["blocks.*.up", "blocks.*.down"]):  # recomputed as a whole, in units or in parts of it
        model, optimizer = build(checkpointed(), stage=3, keep=(), units=units)
        stats = settled_volume(model, optimizer)
        assert stats.volume_elements == 3 * stats.padded_parameters
        ours, theirs = zeroshard.full_state_dict(model), zeroshard.full_state_dict(plain[0])
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@on_ranks(2)
def test_an_evaluation_between_steps_costs_one_gather_of_everything_in_stage_3() -> None:
    model, optimizer = build(net(), stage=3, keep=())
    for number in range(3):
        step(model, optimizer, number)
    with torch.no_grad():
        loss_of(model, 99)
    step(model, optimizer, 3)
    stats = zeroshard.stats(model)
    assert stats.volume_elements == 4 * stats.padded_parameters
