"""Blocks compiled by Inductor on a real device train as plain torch compiles them, with one graph for all blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.matrix import matrix
from zeroshard import Activations
from zeroshard.config.job import ModelConfig
from zeroshard.system import compat_groups
from zeroshard.train.gpt import GPT

CONFIG = ModelConfig(layers=12, hidden=256, heads=4, sequence=128)


def trained(model: nn.Module, optimizer: Any, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 256, (4, CONFIG.sequence), generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compiled() -> GPT:
    torch.compiler.reset()
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = GPT(CONFIG)
    for block in model.blocks:
        block.compile(fullgraph=True)
    return model


@matrix(
    stage=(0, 2, 3),
    activations=(None, Activations(), Activations(offload=True)),
    offload=(None, "cpu"),
)
def test_blocks_train_as_plain_torch_compiles_them(
    stage: int, activations: Activations | None, offload: str | None
) -> None:
    plain = compiled()
    expected = trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    torch._dynamo.utils.counters.clear()
    model = compiled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = zeroshard.shard(model, optimizer, stage=stage, activations=activations, offload=offload)
    assert trained(model, optimizer) == pytest.approx(expected, rel=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "of twelve blocks"


@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_of_eight_compiles_one_graph(stage: int) -> None:
    with compat_groups.one_rank_of(8, 0):
        torch._dynamo.utils.counters.clear()
        model = compiled()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = zeroshard.shard(model, optimizer, stage=stage, precision="bf16")
        assert all(loss > 0 for loss in trained(model, optimizer))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
