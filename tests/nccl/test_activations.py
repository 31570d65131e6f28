"""Activation checkpoints on the host, and divided among tensor-parallel ranks, train as if nothing was recomputed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from tests.loops.harness import assert_equal
from tests.nccl.processes import device, on_nccl
from tests.nccl.runs import CLOSE, loss_of, momentum, trained, trained_with_ddp
from tests.recompute.test_activations import PLAN, Net
from zeroshard import Activations


def build() -> nn.Module:
    torch.manual_seed(1)
    return Net().to(device())


def with_dropout(model: nn.Module, step: int, index: int) -> Tensor:
    """The loss, with random numbers that belong to a step and a part of the data."""
    torch.manual_seed(100 * step + index)
    return loss_of(model, step, index)


@on_nccl(2)
def test_checkpoints_on_the_host_and_blocks_that_are_not_recomputed_train_as_ddp_does() -> None:
    expected = trained_with_ddp(build, momentum, with_dropout)
    for stage in (2, 3):
        for options in (
            Activations(offload=True),
            Activations(recompute=0.4),
            Activations(recompute="auto"),
        ):
            found = trained(build, momentum, with_dropout, stage=stage, activations=options)
            assert_equal(found, expected, CLOSE, f"stage {stage}: {options}")


@pytest.mark.usefixtures("fresh_ranks")
@on_nccl(4)
def test_checkpoints_that_tensor_parallel_ranks_divide_train_as_without_checkpoints() -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))

    def divided() -> nn.Module:
        return parallelize_module(build(), mesh["tp"], PLAN)

    index = mesh["dp"].get_local_rank()
    expected = trained(divided, momentum, with_dropout, index=index, stage=2)
    for stage, options in (
        (2, Activations(partition=True)),
        (3, Activations(partition=True, offload=True)),
    ):
        found = trained(divided, momentum, with_dropout, index=index, stage=stage, activations=options)
        assert_equal(found, expected, CLOSE, f"stage {stage}: {options}")
