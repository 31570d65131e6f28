"""The first minutes of a job on several NCCL ranks: it starts, trains as DDP, and ends when it is told to."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.models import batch
from tests.nccl.processes import on_nccl, outputs, start
from zeroshard.comm.fabric import Fabric

TRAIN = [sys.executable, "-m", "zeroshard", "train", "tiny", "--device", "cuda"]
WORLD = 2


class Normed(nn.Module):
    """Blocks with running statistics, which rank 0 gives to the others in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7)) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Normed().cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        model(batch(step).cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_nccl(WORLD)
def test_every_stage_is_bitwise_ddp_buffers_included_and_sends_them_in_one_message() -> None:
    plain, other = made()
    train(DistributedDataParallel(plain), other)
    sent: list[int] = []
    broadcast = Fabric.broadcast
    for stage in range(4):
        model, optimizer = zeroshard.shard(*made(), stage=stage, device="cuda:0")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                Fabric, "broadcast", lambda self, tensor, **how: (sent.append(1), broadcast(self, tensor, **how))[1]
            )
            sent.clear()
            train(model, optimizer)
        assert len(sent) == 4, f"{len(sent)} broadcasts in 4 steps"
        state = zeroshard.full_state_dict(model)
        for name, value in plain.state_dict().items():
            if "running" not in name or dist.get_rank() == 0:  # DDP's other ranks get them with the next forward
                assert torch.equal(state[name], value.cpu()), f"stage {stage}: {name}"


@on_nccl(WORLD)
def test_ranks_that_were_given_different_things_say_which() -> None:
    model, optimizer = made()
    with pytest.raises(zeroshard.DisagreementError, match=r"rank 0 has stage=1, rank 1 has stage=2"):
        zeroshard.shard(model, optimizer, stage=1 + dist.get_rank(), device="cuda:0")


@pytest.mark.parametrize("options", [["--stage", "1"], ["--stage", "3"], ["--stage", "2", "--offload", "cpu"]])
def test_the_ready_made_job_trains(options: list[str], tmp_path: Path) -> None:
    printed, *_ = outputs(start([*TRAIN, *options, "--out", str(tmp_path)], WORLD))
    losses = [float(loss) for loss in re.findall(r"held-out loss ([\d.]+) (?:before|after)", printed)]
    assert losses[-1] < losses[0] - 0.5
    assert (tmp_path / "model.safetensors").exists()


def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(tmp_path: Path) -> None:
    endless = ["--set", "train.steps=1000000", "--set", "train.evaluate_every=1000000", "--save-every", "10"]
    ranks = start([*TRAIN, *endless, "--out", str(tmp_path)], WORLD)
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob("checkpoints/step-*/COMPLETE")) and time.monotonic() < deadline:
        time.sleep(0.2)
    ranks[1].send_signal(signal.SIGTERM)
    assert "stopped after step" in outputs(ranks)[0]
