"""Every stage trains as DistributedDataParallel does: to the bit on two ranks, within rounding on four."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.loops.harness import assert_equal
from tests.nccl.processes import device, on_nccl
from tests.nccl.runs import CLOSE, STAGES, STEPS, adamw, momentum, train, trained, trained_with_ddp
from zeroshard.comm.fabric import Fabric


class Normed(nn.Module):
    """Blocks with running statistics, which rank 0 gives to the others in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9)) for _ in range(6))
        self.last = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def normed() -> nn.Module:
    torch.manual_seed(1)
    return Normed().to(device())


@on_nccl(2)
def test_every_stage_is_bitwise_ddp_buffers_included_and_sends_them_in_one_message() -> None:
    expected = trained_with_ddp(normed)
    if dist.get_rank() != 0:  # DDP's other ranks get them with the next forward
        expected["weights"] = {name: value for name, value in expected["weights"].items() if "running" not in name}
    sent: list[int] = []
    broadcast = Fabric.broadcast
    for stage in STAGES:
        model = normed()
        model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                Fabric, "broadcast", lambda self, tensor, **how: (sent.append(1), broadcast(self, tensor, **how))[1]
            )
            sent.clear()
            losses = train(model, optimizer)
        assert len(sent) == STEPS, f"{len(sent)} broadcasts in {STEPS} steps"
        state = zeroshard.full_state_dict(model)
        ours = {"losses": losses, "weights": {name: state[name] for name in expected["weights"]}}
        assert_equal(ours, expected, 0.0, f"stage {stage}")


@on_nccl(4)
def test_every_stage_on_four_ranks_is_ddp_within_rounding() -> None:
    expected = trained_with_ddp(make=momentum)
    for stage in STAGES:
        assert_equal(trained(make=momentum, stage=stage), expected, CLOSE, f"stage {stage}")
