"""The memory of a device that this process may still use."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from zeroshard.system import machine
from zeroshard.system.device import available_memory, identity

GPU = torch.device("cuda", 0)
GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU of 80 GiB: 50 are free, this process has tensors of 6 GiB in 10 GiB of torch's allocator."""
    state = SimpleNamespace(free=50 * GIB, total=80 * GIB, allocated=6 * GIB, reserved=10 * GIB, fraction=1.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (state.free, state.total))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: state.allocated)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: state.reserved)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: state.fraction)
    return state


def test_what_other_programs_use_is_not_there(gpu: SimpleNamespace) -> None:
    assert available_memory(GPU) == 54 * GIB  # 50 free, 4 that the allocator has and no tensor


def test_a_cap_on_this_process_counts_less_what_its_tensors_have(gpu: SimpleNamespace) -> None:
    gpu.fraction = 24 / 80
    assert available_memory(GPU) == pytest.approx(18 * GIB, abs=1)
    gpu.fraction = 4 / 80
    assert available_memory(GPU) == 0


def test_ranks_on_one_gpu_divide_what_is_free(gpu: SimpleNamespace) -> None:
    assert available_memory(GPU, sharing=2) == 29 * GIB
    gpu.fraction = 0.1
    assert available_memory(GPU, sharing=2) == 2 * GIB


def test_on_a_cpu_it_is_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 9 * GIB)
    assert available_memory(torch.device("cpu"), sharing=3) == 3 * GIB


def test_a_gpu_is_known_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-7"))
    assert identity(GPU) == "GPU-7"
