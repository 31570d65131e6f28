"""Measuring this machine."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tests.plan.gpts import gpt, step_time
from zeroshard.calibrate import launch_time
from zeroshard.calibrate import measure as measuring
from zeroshard.calibrate.block_speed import GPU_SIZES, Pass, Size, Speed, fit
from zeroshard.calibrate.measure import Calibration, calibrate, toml, write
from zeroshard.calibrate.update_probe import BusyHost, UpdateProbe
from zeroshard.plan.machine.profile import Launch, load
from zeroshard.plan.setup import Setup


@pytest.fixture(scope="module")
def here() -> Calibration:
    return calibrate(torch.device("cpu"))


@pytest.mark.slow
def test_this_machine_is_measured_in_less_than_a_minute(here: Calibration) -> None:
    assert here.seconds < 60
    keys = {"device.efficiency", "device.half_work", "device.traffic", "device.bandwidth", "host.bandwidth"}
    assert keys | {"host.cores", "host.update_fp32", "host.update_bf16", "host.update_8bit"} <= here.measured
    assert 1e-10 < here.machine.host.update_8bit < 1e-7
    assert not any(key.startswith(("inside", "between")) for key in here.measured)  # there is one rank
    assert here.machine.inside == load("cpu").inside


@pytest.mark.slow
def test_a_measured_profile_loads_and_plans(here: Calibration, tmp_path: Path) -> None:
    machine = load(write(here, tmp_path / "mine.toml"))
    assert machine.host.bandwidth == pytest.approx(here.machine.host.bandwidth, rel=1e-3)
    small = gpt(6, 384, 6)
    setup = Setup(stage=0, precision="fp32", batch=2, sequence=256, checkpointing=False)
    assert 0.001 < step_time(small, setup, machine).total < 10


@pytest.mark.slow
def test_the_file_says_what_was_measured_and_what_was_taken_from_a_profile(here: Calibration) -> None:
    text = toml(here)
    assert "# measured" in text
    assert "# taken from 'cpu'" in text


@pytest.mark.slow
def test_a_profile_is_a_toml_file(here: Calibration, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.toml, not 'mine'"):
        write(here, tmp_path / "mine")


def pass_at(speed: Speed, size: Size) -> Pass:
    one = Pass(size, 4, 1024, 1.0)
    products = one.flops / speed.rate * (1 + speed.half_work / size.work)
    return one._replace(seconds=products + one.written * speed.write_seconds)


def test_the_fit_finds_the_speed_of_products_and_memory() -> None:
    speed = Speed(rate=6e14, half_work=1e9, write_seconds=1.2e-12)
    found = fit([pass_at(speed, size) for size in GPU_SIZES])
    assert found == pytest.approx(speed, rel=1e-6)


def test_the_fit_survives_noise() -> None:
    speed = Speed(rate=6e14, half_work=1e6, write_seconds=1e-15)
    passes = [pass_at(speed, size) for size in GPU_SIZES]
    noise = (1.0, 1.3, 0.8, 1.1, 0.9)
    found = fit([one._replace(seconds=one.seconds * factor) for one, factor in zip(passes, noise, strict=True)])
    assert found.rate == pytest.approx(6e14, rel=0.4)
    assert found.half_work >= 1
    assert found.write_seconds >= 0


def test_a_gpu_of_a_known_name_starts_from_its_own_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert measuring.nearest_profile(torch.device("cuda")) == (load("h100"), True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert measuring.nearest_profile(torch.device("cuda")) == (load("a100"), False)


@pytest.mark.slow
def test_launching_is_measured_through_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_time, "DEPTHS", (2, 10))
    monkeypatch.setattr(launch_time, "TURNS", 4)
    with UpdateProbe(torch.device("cpu"), 1 << 16) as update:
        busy_host = BusyHost(update)
        found = launch_time.launch_seconds(torch.device("cpu"), busy_host)
    assert busy_host.taken, "the host was at work"
    assert set(found) == {f"launch.{entry.name}" for entry in fields(Launch)}
    assert min(found.values()) >= 0
    assert found["launch.crowded"] >= 1
    assert 0 < found["launch.block"] < 1
    assert measuring.with_values(load("h200"), found).launch.block == found["launch.block"]


def test_an_error_in_the_second_thread_is_raised_where_the_measurement_ends() -> None:
    class Broken(UpdateProbe):
        def run(self) -> None:
            raise ArithmeticError("the kernel is ill")

    with Broken(torch.device("cpu"), 1 << 10) as update:
        busy_host = BusyHost(update)
        with pytest.raises(ArithmeticError, match="ill"), busy_host:
            pass
