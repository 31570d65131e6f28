"""The memory that ``shard()`` takes while first values move into flats is counted in the plan."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.matrix import matrix
from tests.ranks import Pool
from zeroshard.config.offload import Offload
from zeroshard.config.options import Config
from zeroshard.plan.advice import Variant
from zeroshard.plan.foresee import Foresight
from zeroshard.plan.memory.device_memory import Phase
from zeroshard.plan.memory.rank_memory import RankMemory
from zeroshard.plan.room import Room
from zeroshard.system import compat

WIDTH, VOCABULARY = 128, 4096
OFFLOADS = {
    "none": None,
    "cpu": Offload(),
    "split": Offload(split_master=True, read_back=True),
    "part": Offload(host_fraction=0.5),
    "parameters": Offload(parameters="cpu", split_master=True),
}


class Decoder(nn.Module):
    """An embedding and a head in the root unit, as large as all blocks together."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(16))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


class Alive(compat.OperationWatch):
    """The most bytes of storages that were alive at a time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.most = 0
        self.see([parameter.data for parameter in model.parameters() if not parameter.is_meta])

    def see(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if not tensor.is_meta:
                self.storages[compat.storage_key(tensor)] = weakref.ref(tensor.untyped_storage())
        found = {key: reference() for key, reference in self.storages.items()}
        self.storages = {key: self.storages[key] for key, storage in found.items() if storage is not None}
        self.most = max(self.most, sum(storage.nbytes() for storage in found.values() if storage is not None))


def start(stage: int, offload: Offload | None, built: str) -> tuple[float, int]:
    """The bytes that the plan expects at the start, and those that were alive, both without host memory."""
    with torch.device("cpu" if built == "cpu" else "meta"):
        model = Decoder()
    if built == "bf16":
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"stage": stage, "offload": offload, "precision": "bf16", "max_unit_bytes": 1 << 20}
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    room = Room(1 << 40, 1 << 40, on_cpu=True)
    row = Foresight(model, optimizer, Config.parse(options), world, room).row(stage, Variant("", offload))
    memory = RankMemory(row.setup, row.traced, 0)
    phase, more = next(memory.moments())
    assert phase is Phase.START
    alive = Alive(model)
    with alive:
        model, _ = zeroshard.shard(model, optimizer, **options)
    host = zeroshard.stats(model).host_memory
    return memory.rest.total + sum(more.values()), alive.most - (0 if host is None else host.total)


def check(stage: int, offload: str, built: str) -> None:
    planned, seen = start(stage, OFFLOADS[offload], built)
    assert seen <= 1.02 * planned, "more was alive than planned"
    assert seen >= 0.75 * planned, "a plan of far more would refuse what fits"


@matrix(stage=[0, 2, 3], offload=["none", "cpu", "split", "part", "parameters"], built=["cpu", "fp32", "bf16"])
def test_what_shard_takes_itself_is_planned(stage: int, offload: str, built: str) -> None:
    if offload == "parameters" and stage < 3:
        pytest.skip("parameters rest on the host in stage 3 alone")
    check(stage, offload, built)


@pytest.mark.parametrize("offload", ["none", "split"])
@pytest.mark.parametrize("stage", [1, 3])
def test_what_shard_takes_on_two_ranks_is_planned(stage: int, offload: str) -> None:
    Pool.shared().run(check, 2, {"stage": stage, "offload": offload, "built": "bf16"})
