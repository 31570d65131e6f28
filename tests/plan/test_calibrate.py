"""Measuring the machine at hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zeroshard.plan import calibrate as measuring
from zeroshard.plan import launching
from zeroshard.plan.calibrate import Calibration, calibrate, fit, toml, write
from zeroshard.plan.machine_profile import load
from zeroshard.plan.shape import Setup, Transformer
from zeroshard.plan.time import step_time


@pytest.fixture(scope="module")
def here() -> Calibration:
    return calibrate(torch.device("cpu"))


def test_this_machine_is_measured_in_under_a_minute(here: Calibration) -> None:
    assert here.seconds < 60
    assert {"device.efficiency", "device.half_work", "device.bandwidth", "host.bandwidth"} <= here.measured
    assert not any(key.startswith(("inside", "between")) for key in here.measured)  # there is one rank
    assert here.machine.inside == load("cpu").inside


def test_a_measured_profile_loads_and_plans(here: Calibration, tmp_path: Path) -> None:
    machine = load(write(here, tmp_path / "mine.toml"))
    assert machine.host.bandwidth == pytest.approx(here.machine.host.bandwidth, rel=1e-3)
    small = Transformer(layers=6, hidden=384, heads=6, vocabulary=256, positions=256)
    setup = Setup(stage=0, precision="fp32", batch=2, sequence=256, checkpointing=False)
    assert 0.001 < step_time(small, setup, machine).total < 10


def test_the_file_says_what_was_measured_and_what_was_kept(here: Calibration) -> None:
    text = toml(here)
    assert "# measured" in text
    assert "# kept from 'cpu'" in text


def test_a_profile_is_a_toml_file(here: Calibration, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.toml, not 'mine'"):
        write(here, tmp_path / "mine")


def test_the_fit_finds_a_saturating_rate_and_survives_noise() -> None:
    works = [1e6, 1e7, 1e8, 1e9]
    rate, half = fit(works, [7e12 * work / (work + 3e7) for work in works])
    assert rate == pytest.approx(7e12, rel=0.02)
    assert half == pytest.approx(3e7, rel=0.1)
    rate, _ = fit(works, [2e12, 1e12, 1e12, 3e12])
    assert 1e12 < rate < 5e12


def test_a_gpu_of_a_known_name_starts_from_its_own_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert measuring.nearest_profile(torch.device("cuda")) == (load("h100"), True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert measuring.nearest_profile(torch.device("cuda")) == (load("a100"), False)


def test_launching_is_measured_through_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "DEPTHS", (2, 10))
    monkeypatch.setattr(launching, "TURNS", 4)
    found = launching.launch_seconds(torch.device("cpu"))
    names = ("forward", "backward", "recompute", "communicate", "offload", "hand_over", "beside", "update", "step")
    assert set(found) == {f"launch.{name}" for name in names}
    assert min(found.values()) >= 0
    assert 0 < found["launch.forward"] < 1
    assert measuring.with_values(load("h200"), found).launch.forward == found["launch.forward"]
