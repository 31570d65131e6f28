"""Auto under a cap of this process's GPU memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.ranks import on_ranks
from zeroshard.config.job import ModelConfig
from zeroshard.config.offload import Offload
from zeroshard.config.options import Config
from zeroshard.plan.advice import Variant
from zeroshard.plan.foresee import Foresight
from zeroshard.plan.memory.rank_memory import RankMemory
from zeroshard.plan.room import room_of
from zeroshard.runtime import runtime_of
from zeroshard.system.device import available_memory
from zeroshard.train.gpt import GPT

SHAPE = ModelConfig(layers=24, hidden=1024, heads=16, sequence=512, vocabulary=8192)
GIB = 1 << 30


@pytest.fixture
def cap() -> Iterator[int]:
    """A cap of 1.5 GiB. The states of ``SHAPE``, 0.31 billion parameters, take 4.6 GiB."""
    torch.cuda.empty_cache()
    bytes_allowed = torch.cuda.memory_reserved() + 3 * GIB // 2
    torch.cuda.set_per_process_memory_fraction(bytes_allowed / torch.cuda.mem_get_info()[1])
    yield bytes_allowed
    torch.cuda.set_per_process_memory_fraction(1.0)


def meta_model() -> tuple[GPT, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = GPT(SHAPE)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def test_auto_trains_under_a_cap(cap: int, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = torch.randint(256, (2, 512), device="cuda")
    model, made = meta_model()
    torch.cuda.reset_peak_memory_stats()
    options: dict[str, Any] = {"activations": zeroshard.Activations(), "example": (tokens, tokens)}
    model, optimizer = zeroshard.shard(model, made, stage="auto", offload="auto", precision="bf16", **options)
    for _ in range(3):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    zeroshard.synchronize(model)
    assert "offload cpu" in capsys.readouterr().out
    assert zeroshard.stats(model).host_memory is not None
    assert torch.cuda.max_memory_reserved() <= cap


@pytest.mark.parametrize("offload", [None, Offload(), Offload(split_master=True, read_back=True)])
def test_what_shard_takes_is_planned(offload: Offload | None) -> None:
    model, made = meta_model()
    options: dict[str, Any] = {"stage": 0, "offload": offload, "precision": "bf16"}
    room = room_of(model, torch.device("cuda", torch.cuda.current_device()))
    row = Foresight(model, made, Config.parse(options), 1, room).row(0, Variant("", offload))
    memory = RankMemory(row.setup, row.traced, 0)
    _, more = next(memory.moments())
    planned = memory.rest.total + sum(more.values())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model, _ = zeroshard.shard(model, made, **options)
    taken = torch.cuda.max_memory_allocated() - before
    assert 0.75 * planned <= taken <= 1.02 * planned


@on_ranks(2)
def test_ranks_on_one_gpu_divide_what_is_free() -> None:
    model, made = meta_model()
    device = torch.device("cuda", 0)
    model, _ = zeroshard.shard(model, made, stage=2, device="cuda:0", precision="bf16")
    ranks = runtime_of(model).fabric.device_ranks
    assert ranks == dist.get_world_size()
    free = torch.cuda.mem_get_info(device)[0]
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    assert available_memory(device, ranks) == pytest.approx(free / 2 + unused, rel=0.05)
