"""Checkpoints of models with tensor parallelism: any degree of it to any other, and to none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroshard
from tests.models import net
from tests.ranks import Pool
from tests.storage.runs import difference
from tests.training import adamw
from zeroshard.comm.fabric import DisagreementError

WIDTH = 13
"""Divides by no degree: parts are of different sizes."""


def run_of(degree: int, **options: Any) -> tuple[Any, Any]:
    model = net(width=WIDTH, depth=2)
    world = torch.distributed.get_world_size()
    if degree > 1:
        mesh = init_device_mesh("cpu", (world // degree, degree), mesh_dim_names=("dp", "tp"))
        styles: dict[str, Any] = {
            "blocks.*.up": ColwiseParallel(use_local_output=False),
            "blocks.*.down": RowwiseParallel(),
        }
        parallelize_module(model, mesh["tp"], styles)
    return zeroshard.shard(model, adamw(model.parameters()), **options)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(6, 7, generator=torch.Generator().manual_seed(step))  # the same on all ranks
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"weights": zeroshard.full_state_dict(model), "optimizer": optimizer.state_dict()}


def save_and_load(folder: str) -> dict[str, Any]:
    bf16 = {"precision": "bf16"}
    model, optimizer = run_of(2, stage=2, **bf16)
    train(model, optimizer, range(2))
    zeroshard.save(folder, model, optimizer)
    saved = everything(model, optimizer)
    train(model, optimizer, range(2, 4))
    for degree, options in ((1, {"stage": 3}), (2, {"stage": 1}), (4, {"stage": 3}), (4, {"stage": 0})):
        other, resumed = run_of(degree, **options, **bf16)
        zeroshard.load(folder, other, resumed)
        assert difference(everything(other, resumed), saved) is None, f"2 → {degree}"
        zeroshard.save(f"{folder}-{degree}", other, resumed)
        again, once_more = run_of(2, stage=2, **bf16)
        zeroshard.load(f"{folder}-{degree}", again, once_more)
        assert difference(everything(again, once_more), saved) is None, f"{degree} → 2"
        train(again, once_more, range(2, 4))
        assert difference(everything(again, once_more), everything(model, optimizer)) is None
    return saved


def load_alone(folder: str) -> dict[str, Any]:
    model, optimizer = run_of(1, stage=2, precision="bf16", offload="cpu")
    zeroshard.load(folder, model, optimizer)
    return everything(model, optimizer)


@pytest.mark.slow
def test_any_degree_of_tensor_parallelism_loads_into_any_other(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    saved = Pool.shared().run(save_and_load, 4, {"folder": folder})[0]
    for name in ("", "-4"):
        alone = Pool.shared().run(load_alone, 1, {"folder": folder + name})[0]
        assert difference(alone["weights"], saved["weights"]) is None
        assert difference(alone["optimizer"]["state"], saved["optimizer"]["state"]) is None


# -- random numbers ---------------------------------------------------------------------------------------------------


def drawn_after(folder: str, degree: int) -> float:
    """Loads, and draws a number."""
    model, optimizer = run_of(degree, stage=1)
    torch.manual_seed(50 + torch.distributed.get_rank())
    zeroshard.load(folder, model, optimizer)
    return float(torch.rand(()))


def save_with_numbers(folder: str, degree: int) -> float:
    """Saves, with another state of the generator for each part of the data; returns the number that is next."""
    model, optimizer = run_of(degree, stage=1)
    train(model, optimizer, range(1))
    torch.manual_seed(7 + torch.distributed.get_rank() // degree)
    zeroshard.save(folder, model, optimizer)
    return float(torch.rand(()))


@pytest.mark.slow
def test_ranks_that_divide_a_model_draw_the_same_numbers_after_any_rearrangement(tmp_path: Path) -> None:
    for world, degree in ((2, 1), (4, 2)):
        folder = str(tmp_path / f"{world}-{degree}")
        before = Pool.shared().run(save_with_numbers, world, {"folder": folder, "degree": degree})
        zero, one = before[0], before[-1]
        same = Pool.shared().run(drawn_after, world, {"folder": folder, "degree": degree})
        assert same == before
        divided = Pool.shared().run(drawn_after, 2, {"folder": folder, "degree": 2})
        assert divided == [zero, zero]
        more = Pool.shared().run(drawn_after, 4, {"folder": folder, "degree": 2})
        assert more == [zero, zero, one, one]
        undivided = Pool.shared().run(drawn_after, 4, {"folder": folder, "degree": 1})
        assert undivided[:2] == [zero, one]
        assert len(set(undivided)) == 4  # parts of the data that are new have numbers of their own


def drift_after_loading(folder: str) -> None:
    model, optimizer = run_of(2, stage=1)
    train(model, optimizer, range(1))
    zeroshard.save(folder, model, optimizer)
    zeroshard.load(folder, model, optimizer)
    x = torch.randn(6, 7, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    model(x).float().square().mean().backward()
    with pytest.raises(DisagreementError, match="draw different random numbers"):
        optimizer.step()


def test_replicas_that_drift_apart_are_found_in_the_first_step_after_a_load(tmp_path: Path) -> None:
    Pool.shared().run(drift_after_loading, 2, {"folder": str(tmp_path / "saved")})
