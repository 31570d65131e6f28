"""Weights for inference engines, and states that sleep while such an engine runs, on two ranks."""

from __future__ import annotations

import pytest
import torch

import zeroshard
from tests.loops.harness import assert_equal
from tests.models import Net
from tests.nccl.processes import device, on_nccl, on_the_device
from tests.nccl.runs import STAGES, adamw, small, train


@pytest.mark.parametrize("offload", [None, "cpu"], ids=["on the device", "offloaded"])
@on_nccl(2)
def test_training_goes_on_with_the_same_bits_after_a_phase_of_generation(offload: str | None) -> None:
    for stage in STAGES:
        found = []
        for sleeps in (False, True):
            model = small()
            model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=stage, offload=offload)
            for step in range(3):
                train(model, optimizer, steps=[step])
                if sleeps:
                    whole = dict(zeroshard.whole_parameters(model))
                    assert_equal(
                        {name: value.cpu() for name, value in whole.items()},
                        zeroshard.full_state_dict(model),
                        0,
                        "weights out",
                    )
                    zeroshard.offload_states(model)
                    zeroshard.restore_states(model)
            found.append(zeroshard.full_state_dict(model))
        assert_equal(found[1], found[0], 0, f"stage {stage}")


@on_the_device
@on_nccl(2)
def test_weights_out_hold_at_most_two_units() -> None:
    torch.manual_seed(1)
    model = Net(width=512, depth=8).to(device())
    unit = 4 * sum(p.numel() for p in model.blocks[0].parameters())
    model, optimizer = zeroshard.shard(model, adamw(model.parameters()), stage=3)
    train(model, optimizer, steps=[0])
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _name, value in zeroshard.whole_parameters(model):
        del value
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2.1 * unit
    assert torch.cuda.memory_allocated() - before < 64 << 10
