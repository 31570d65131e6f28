"""States that sleep in host memory: the device's allocator has nothing of them, and training goes on."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import zeroshard
from tests.gpu.test_one_process import inputs
from tests.models import net
from zeroshard import Offload

SLACK = 256 << 10
"""Bytes of placeholders and of scalars, which stay on the device: 512 each."""
OPTIONS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in (0, 1, 3)},
    "offload": {"stage": 2, "offload": "cpu"},
    "read back": {"stage": 2, "offload": Offload(split_master=True, read_back=True)},
    "delayed": {"stage": 2, "offload": Offload(delayed_update_after=1)},
    "parameters on the host": {"stage": 3, "offload": Offload(parameters="cpu")},
}


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def build(options: dict[str, Any]) -> tuple[Any, Any]:
    model = net(width=384, depth=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=options.get("offload") is None)
    return zeroshard.shard(model, optimizer, device="cuda", precision="bf16", clip_grad_norm=1.0, **options)


def train(model: Any, optimizer: Any, step: int) -> float:
    loss = model(inputs(step)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("way", OPTIONS)
def test_the_device_is_empty_while_states_sleep_and_losses_stay(way: str) -> None:
    model, optimizer = build(OPTIONS[way])
    expected = [train(model, optimizer, step) for step in range(6)]
    zeroshard.synchronize(model)
    del model, optimizer  # the workspaces of the libraries stay, and are no states
    before = allocated()
    model, optimizer = build(OPTIONS[way])
    losses = []
    for step in range(6):
        losses.append(train(model, optimizer, step))
        if step in (1, 4):
            awake = allocated()
            zeroshard.offload_states(model)
            assert allocated() - before < SLACK
            assert zeroshard.stats(model).memory.total == 0
            room = torch.empty(max(1, awake - before), dtype=torch.uint8, device="cuda")  # somebody else has the device
            del room
            zeroshard.restore_states(model)
            assert allocated() <= awake + SLACK
    assert losses == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_what_does_not_fit_back_stays_asleep_until_there_is_room() -> None:
    model, optimizer = build({"stage": 1})
    expected = [train(model, optimizer, step) for step in range(3)]
    model, optimizer = build({"stage": 1})
    losses = [train(model, optimizer, step) for step in range(2)]
    zeroshard.offload_states(model)
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (4 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            zeroshard.restore_states(model)
        with pytest.raises(RuntimeError, match="sleep in host memory"):
            model(inputs(2))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert free > 0
    zeroshard.restore_states(model)
    assert [*losses, train(model, optimizer, 2)] == expected
