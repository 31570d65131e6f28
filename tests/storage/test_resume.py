"""Save and load on real ranks: what goes on from a checkpoint is what was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.matrix import slow
from tests.ranks import Pool
from tests.storage.runs import SETUPS, Run, adamw, asgd, difference, momentum
from zeroshard.offload.codes import TILE, decode, encode

OPTIMIZERS = {"adamw": adamw, "momentum": momentum, "asgd": asgd}


def same_bits(folder: str, setup: str, optimizer: str = "adamw") -> None:
    """Five steps at once, and three, a checkpoint, and two more in another model."""
    options, make = SETUPS[setup], OPTIMIZERS[optimizer]
    whole = Run(options, make)
    whole.train(5)
    first = Run(options, make)
    first.train(3)
    first.save(folder, extra={"note": "é", "table": torch.arange(3)})
    first.train(1)  # what comes after a save does not reach it
    other = Run(options, make, seed=2)
    if "delayed" not in setup:  # what was trained before goes; what was not must come with the checkpoint
        other.train(1)
    extra = other.load(folder)
    assert extra["note"] == "é"
    assert torch.equal(extra["table"], torch.arange(3))
    other.losses.clear()
    other.train(2)
    assert other.losses == whole.losses[3:], f"{setup}, {optimizer}"
    assert difference(other.everything(), whole.everything()) is None, f"{setup}, {optimizer}"


QUICK = ("stage 3", "stage 1 bf16", "fp16", "bf16 moments", "8-bit moments", "delayed, two micro-batches")
"""Setups that between them have every kind of state."""
OTHERS = [name for name in SETUPS if name not in QUICK]


@pytest.mark.parametrize("names", [QUICK, *(slow(OTHERS[part::3]) for part in range(3))], ids=["quick", *"abc"])
def test_resumed_training_has_the_same_bits_on_two_ranks(names: list[str], tmp_path: Path) -> None:
    Pool.shared().run(run_same_bits, 2, {"folder": str(tmp_path), "cases": [(name, "adamw") for name in names]})


@pytest.mark.slow
def test_resumed_training_has_the_same_bits_with_other_optimizers(tmp_path: Path) -> None:
    cases = [("stage 1", "momentum"), ("stage 3 bf16", "asgd")]
    cases += [
        (setup, "momentum") for setup in ("offload", "bf16 moments", "8-bit moments", "delayed split", "read back")
    ]
    Pool.shared().run(run_same_bits, 2, {"folder": str(tmp_path), "cases": cases})


@pytest.mark.slow
def test_resumed_training_has_the_same_bits_on_one_and_three_ranks(tmp_path: Path) -> None:
    for world, names in ((1, ("stage 3", "delayed")), (3, ("stage 0", "stage 1 bf16", "stage 3", "offload", "split"))):
        cases = [(name, "adamw") for name in names]
        Pool.shared().run(run_same_bits, world, {"folder": str(tmp_path / str(world)), "cases": cases})


def run_same_bits(folder: str, cases: list[tuple[str, str]]) -> None:
    for setup, optimizer in cases:
        same_bits(f"{folder}/{setup} {optimizer}", setup, optimizer)


# -- any to any -------------------------------------------------------------------------------------------------------

FROM = [("delayed split", 3), ("stage 0 bf16", 2), ("stage 3 bf16", 3), ("stage 1 bf16", 1), ("offload", 2)]
TO = [
    ("stage 0 bf16", 3),
    ("stage 1 bf16", 2),
    ("stage 2 bf16", 1),
    ("stage 3 bf16", 2),
    ("cast on gather", 3),
    ("offload", 3),
    ("split", 2),
    ("read back", 1),
    ("half on the host", 2),
    ("parameters on the host", 3),
    ("delayed", 1),
]


def save_at(folder: str, setup: str, world: int) -> dict[str, Any]:
    run = Run(SETUPS[setup])
    run.train(3)
    run.save(folder)
    return run.everything()


def load_at(folder: str, setups: list[str], steps: int = 0) -> list[dict[str, Any]]:
    found = []
    for setup in setups:
        run = Run(SETUPS[setup], seed=3)
        run.load(folder)
        run.train(steps)
        found.append(run.everything())
    return found


def comparable(everything: dict[str, Any]) -> dict[str, Any]:
    """Without what says how a run computes."""
    for group in everything["optimizer"]["param_groups"]:
        for name in ("foreach", "fused", "capturable"):
            group.pop(name, None)
    return everything


@pytest.mark.parametrize(("setup", "world"), [FROM[0], *(slow(*case) for case in FROM[1:])])
def test_a_checkpoint_loads_into_any_other_setup_with_the_same_states(setup: str, world: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    expected = comparable(Pool.shared().run(save_at, world, {"folder": folder, "setup": setup, "world": world})[0])
    for there in (1, 2, 3):
        names = [name for name, world_of in TO if world_of == there]
        found = Pool.shared().run(load_at, there, {"folder": folder, "setups": names})[0]
        for name, everything in zip(names, found, strict=True):
            assert difference(comparable(everything), expected) is None, f"{setup} on {world} → {name} on {there}"


MOMENTS = ("offload", "bf16 moments", "8-bit moments")


@pytest.mark.parametrize("setup", MOMENTS)
def test_moments_of_any_kind_load_as_any_other_kind(setup: str, tmp_path: Path) -> None:
    """Rounded to the nearest where the kind has fewer bits, and exact where not."""
    folder = str(tmp_path / "saved")
    expected = comparable(Pool.shared().run(save_at, 2, {"folder": folder, "setup": setup, "world": 2})[0])
    for name, found in zip(
        MOMENTS, Pool.shared().run(load_at, 1, {"folder": folder, "setups": MOMENTS})[0], strict=True
    ):
        assert difference(comparable(found)["weights"], expected["weights"]) is None, name
        for key, state in expected["optimizer"]["state"].items():
            loaded = found["optimizer"]["state"][key]
            assert torch.equal(loaded["master"], state["master"])
            assert loaded["step"] == state["step"]
            for moment, dtype in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
                values = state[moment].float()
                if name == "bf16 moments":
                    values = values.bfloat16().float()
                elif name == "8-bit moments":
                    values = in_8_bits(values, dtype)
                assert torch.equal(loaded[moment].float(), values), f"{name}: {moment}"


def in_8_bits(values: Tensor, dtype: torch.dtype) -> Tensor:
    codes = torch.empty(values.numel(), dtype=dtype)
    scales = torch.empty(-(-values.numel() // TILE), dtype=torch.uint8)
    encode(values.flatten(), codes, scales)
    return decode(codes, scales).float().view(values.shape)


def is_parameter(name: str) -> bool:
    return name not in ("running_mean", "_extra_state")


def test_precision_changes_on_load(tmp_path: Path) -> None:
    """From fp32 without master to bf16 with one, and back: the values are the same, rounded where they must be."""
    folder = str(tmp_path / "fp32")
    expected = Pool.shared().run(save_at, 2, {"folder": folder, "setup": "stage 2", "world": 2})[0]
    bf16, fp16 = Pool.shared().run(load_at, 2, {"folder": folder, "setups": ["stage 3 bf16", "fp16"]})[0]
    for found, dtype in ((bf16, torch.bfloat16), (fp16, torch.float16)):
        for name, value in expected["weights"].items():
            if is_parameter(name):
                assert torch.equal(found["weights"][name], value.to(dtype)), name
        for key, state in expected["optimizer"]["state"].items():
            assert torch.equal(found["optimizer"]["state"][key]["exp_avg"], state["exp_avg"])
    folder = str(tmp_path / "bf16")
    expected = Pool.shared().run(save_at, 2, {"folder": folder, "setup": "stage 3 bf16", "world": 2})[0]
    (fp32,) = Pool.shared().run(load_at, 3, {"folder": folder, "setups": ["stage 1"]})[0]
    for name, wanted in expected["weights"].items():
        if not is_parameter(name):
            continue
        assert torch.equal(fp32["weights"][name].to(wanted.dtype), wanted), name


def mesh_and_world(folder: str) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2))
    options = {"stage": 3, "precision": "bf16"}
    divided = Run({**options, "mesh": mesh})
    divided.train(3)
    divided.save(folder)
    plain = Run(options, seed=2)
    plain.load(folder)
    assert difference(plain.everything(), divided.everything()) is None
    again = Run({**options, "mesh": mesh}, seed=3)
    plain.save(folder)
    again.load(folder)
    assert difference(again.everything(), plain.everything()) is None


def test_a_mesh_and_a_plain_world_read_each_others_checkpoints(tmp_path: Path) -> None:
    Pool.shared().run(mesh_and_world, 4, {"folder": str(tmp_path / "saved")})
