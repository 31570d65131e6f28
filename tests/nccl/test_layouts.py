"""Four ranks as a grid: two replicas of two shards, and two data-parallel by two tensor-parallel ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from tests.comm.test_parallel import WIDTH, plan
from tests.loops.harness import assert_equal
from tests.models import net
from tests.nccl.processes import device, on_nccl
from tests.nccl.runs import CLOSE, momentum, trained, trained_alone


@pytest.mark.usefixtures("fresh_ranks")
@on_nccl(4)
def test_two_replicas_of_two_shards_train_as_one_rank_does() -> None:
    mesh = init_device_mesh(device().type, (2, 2))
    expected = trained_alone(4, dist.get_rank())
    for stage in (1, 2, 3):
        assert_equal(trained(make=momentum, stage=stage, mesh=mesh), expected, CLOSE, f"stage {stage}")


@pytest.mark.usefixtures("fresh_ranks")
@on_nccl(4)
def test_two_by_two_tensor_parallel_ranks_train_as_one_does() -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))

    def build() -> nn.Module:
        return net(width=WIDTH, depth=2).to(device())

    def divided() -> nn.Module:
        return parallelize_module(build(), mesh["tp"], plan())

    index = mesh["dp"].get_local_rank()
    expected = trained_alone(2, index, build)
    for stage, offload in ((1, None), (3, None), (2, "cpu")):
        options = {"stage": stage, "offload": offload, "mesh": mesh["dp"], "clip_grad_norm": 1e9}
        found = trained(divided, momentum, index=index, **options)
        assert_equal(found, expected, CLOSE, f"stage {stage}, offload {offload}")
