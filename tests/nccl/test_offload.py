"""States on the host, in all ways, on two ranks that share a GPU and the host."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.loops.harness import Log, assert_equal
from tests.nccl.processes import on_nccl
from tests.nccl.runs import CLOSE, STEPS, adamw, loss_of, small, trained, trained_with_ddp, weights
from zeroshard import Offload

COARSE = 2e-2
"""Relative distance of parameters and states in 16 bits from DDP in 32."""

EXACT: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1, "offload": "cpu"},
    "stage 2": {"stage": 2, "offload": "cpu"},
    "stage 3": {"stage": 3, "offload": "cpu"},
    "in backward, stage 1": {"stage": 1, "offload": Offload(update_in_backward=True)},
    "in backward, stage 3": {"stage": 3, "offload": Offload(update_in_backward=True)},
    "parameters on the host": {"stage": 3, "offload": Offload(parameters="cpu")},
    "half on the host": {"stage": 2, "offload": Offload(host_fraction=0.5)},
}


@on_nccl(2)
def test_every_exact_way_of_offload_trains_as_ddp_does() -> None:
    expected = trained_with_ddp()
    for name, options in EXACT.items():
        assert_equal(trained(**options), expected, CLOSE, name)


def as_one_vector(log: Log) -> Log:
    """Small parameters that begin with zeros have only a few digits in 16 bits, so they are compared with the rest."""
    return {
        "losses": log["losses"],
        "weights": torch.cat([value.float().flatten() for value in log["weights"].values()]),
    }


@on_nccl(2)
def test_16_bit_parameters_stay_near_ddp_and_a_split_master_changes_no_bit() -> None:
    in_32_bits = as_one_vector(trained_with_ddp())
    expected = trained(stage=2, precision="bf16", offload="cpu")
    assert_equal(as_one_vector(expected), in_32_bits, COARSE, "fp32 states")
    for offload in (Offload(split_master=True), Offload(split_master=True, read_back=True, update_in_backward=True)):
        assert_equal(trained(stage=2, precision="bf16", offload=offload), expected, 0.0, str(offload))
    for stage, place, moments in ((2, "device", torch.bfloat16), (3, "cpu", torch.bfloat16), (2, "device", "8bit")):
        offload = Offload(split_master=True, moments=moments, parameters=place)
        found = trained(stage=stage, precision="bf16", offload=offload)
        assert_equal(as_one_vector(found), in_32_bits, COARSE, f"{moments} moments in stage {stage}")


def delayed_by_hand(after: int) -> Log:
    """Plain torch. Every gradient after some steps is of the parameters before the last update."""
    model, newest = small(), small()
    optimizer = adamw(newest.parameters())
    losses = []
    for step in range(STEPS):
        for index in range(dist.get_world_size()):
            loss = loss_of(model, step, index)
            (loss / dist.get_world_size()).backward()
            if index == dist.get_rank():
                losses.append(loss.item())
        before = weights(newest)
        for parameter, master in zip(model.parameters(), newest.parameters(), strict=True):
            master.grad = parameter.grad
        optimizer.step()
        model.load_state_dict(before if step >= after else newest.state_dict())
        model.zero_grad()
    return {"losses": losses, "weights": weights(newest)}


@on_nccl(2)
def test_a_delayed_step_runs_on_the_parameters_of_the_last_but_one_update() -> None:
    expected = delayed_by_hand(after=1)
    for stage, parameters in ((1, "device"), (2, "device"), (3, "cpu")):
        offload = Offload(delayed_update_after=1, parameters=parameters)
        assert_equal(trained(stage=stage, offload=offload), expected, CLOSE, f"stage {stage}, {offload}")
