"""Two and four ranks that share one GPU over Gloo: the stages train as DistributedDataParallel does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.models import Block, batch, net
from tests.ranks import Pool, on_ranks

STAGES = (0, 1, 2, 3)


def weights_after(model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        model(batch(step).cuda()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def compare(precision: str | None) -> None:
    exact = dist.get_world_size() == 2
    plain = net(width=96).cuda()
    ddp = DistributedDataParallel(plain)
    weights_after(ddp, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    results = []
    for stage in STAGES:
        model = net(width=96)
        options = {"device": "cuda:0", "stage": stage, "precision": precision}
        model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)
        weights_after(model, model, optimizer)
        results.append(zeroshard.full_state_dict(model))
    for name, value in plain.state_dict().items():
        if precision is None and exact:
            assert all(torch.equal(result[name], value.cpu()) for result in results), name
        elif precision is None:
            torch.testing.assert_close(results[0][name], value.cpu(), rtol=1e-3, atol=1e-5)
        for result in results[1:]:
            torch.testing.assert_close(result[name], results[0][name], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("world", [2, 4])
def test_every_stage_trains_as_ddp_on_ranks_that_share_a_gpu(world: int, precision: str | None) -> None:
    Pool.shared().run(compare, world, {"precision": precision})


class Reordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(7) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number in [0, 1, 2, 3] if dist.get_rank() == 0 else [0, 2, 1, 3]:
            x = self.blocks[number](x)
        return x


@on_ranks(2)
def test_units_in_another_order_are_named_before_the_update_where_messages_carry_no_names() -> None:
    model = Reordered()
    model, optimizer = zeroshard.shard(
        model, torch.optim.SGD(model.parameters()), stage=3, device="cuda:0", stall_timeout=5.0
    )

    def train_one_step() -> None:
        model(batch(0).cuda()).sum().backward()
        optimizer.step()

    named = r"(all_gather|reduce_scatter) blocks\.\d"
    with pytest.raises((zeroshard.StallError, zeroshard.DisagreementError), match=named):
        train_one_step()
