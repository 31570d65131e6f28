"""The hardware that a plan is for, if it is this machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from zeroshard.plan.machine import hardware
from zeroshard.plan.machine.hardware import find_hardware


@pytest.fixture(autouse=True)
def a_gpu_of_80_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80e9))
    monkeypatch.setattr(hardware, "available_memory", lambda device: 30_000_000_000)


def test_on_this_machine_counts_what_is_free_now() -> None:
    found = find_hardware()
    assert found.device_memory == 30e9
    assert found.machine is not None
    assert found.machine.name == "h100"
    assert found.usable_device_memory == pytest.approx(0.96 * 30e9), "nothing is subtracted twice"


def test_devices_that_are_named_have_all_their_memory() -> None:
    assert find_hardware(gpus=8).device_memory == 80e9
    assert find_hardware(gpu_memory=40).device_memory == 40e9
