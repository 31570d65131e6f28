"""Host memory in blocks of exact size."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from zeroshard.offload.pinned import ALIGNMENT, HostBlock, aligned


def test_buffers_are_zero_disjoint_aligned_and_writable() -> None:
    sizes = [(3, torch.float32), (1, torch.bfloat16), (0, torch.float32), (200, torch.int16), (64, torch.float32)]
    block = HostBlock(sum(aligned(n * d.itemsize) for n, d in sizes), pinned=False)
    taken = [block.take(numel, dtype) for numel, dtype in sizes]
    for tensor, (numel, dtype) in zip(taken, sizes, strict=True):
        assert tensor.dtype is dtype
        assert tensor.shape == (numel,)
        assert not tensor.any()
        assert tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT == 0
    for number, tensor in enumerate(taken):
        tensor.fill_(number + 1)
    for number, tensor in enumerate(taken):
        assert bool((tensor == number + 1).all())


def test_no_more_can_be_taken_than_was_counted() -> None:
    block = HostBlock(2 * ALIGNMENT, pinned=False)
    block.take(1, torch.float32)
    block.take(ALIGNMENT // 4, torch.float32)
    with pytest.raises(AssertionError, match="more was taken"):
        block.take(1, torch.uint8)


def test_an_empty_block_is_fine() -> None:
    assert HostBlock(0, pinned=False).take(0, torch.float32).shape == (0,)
    assert HostBlock(0, pinned=True).take(0, torch.float32).shape == (0,)


def test_a_buffer_outlives_its_block() -> None:
    taken = HostBlock(ALIGNMENT, pinned=False).take(4, torch.float32)
    gc.collect()
    assert taken.add_(1).tolist() == [1.0] * 4


def test_memory_is_pinned_in_exactly_the_size_asked_for_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, int]] = []

    def register(pointer: int, size: int, flags: int) -> int:
        calls.append(("pin", pointer, size))
        return 0

    def unregister(pointer: int) -> None:
        calls.append(("unpin", pointer, 0))

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(("wait", 0, 0)))
    size = 12345 * ALIGNMENT
    block = HostBlock(size, pinned=True)
    pointer = block.take(1, torch.uint8).data_ptr()
    assert calls == [("pin", pointer, size)]
    del block
    gc.collect()
    assert calls[1:] == [("wait", 0, 0), ("unpin", pointer, 0)], "a copy may still read it"


def test_memory_that_cannot_be_pinned_is_said_with_size_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    with pytest.raises(ValueError, match=r"offload: 537 MB .*CUDA error 2.*ulimit -l.*host_fraction="):
        HostBlock(1 << 29, pinned=True)
