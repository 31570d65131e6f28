"""An out-of-memory error says what used the memory, and which setting would fit."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.models import loss_of, net
from tests.ranks import on_ranks
from zeroshard.observe import shortage
from zeroshard.runtime import runtime_of
from zeroshard.system import compat

OUT = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Greedy(nn.Module):
    """Runs out of memory where it is told to."""

    where = ""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise torch.OutOfMemoryError(OUT)
        result: Tensor = self.inner(x)
        return result


def greedy(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Greedy]:
    model = net(width=64, depth=16)
    part = Greedy(model.blocks[2].up)
    model.blocks[2].up = part
    model, optimizer = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), **options)
    return model, optimizer, part


def answer_of(model: nn.Module, device: str = "cpu") -> shortage.Answer:
    runtime = runtime_of(model)
    answer = shortage.Answer(model, runtime.units, runtime.ledger, title="rank 0", device=torch.device(device))
    answer.device = torch.device("cuda", 0)
    return answer


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def test_a_forward_that_runs_out_of_memory_is_answered_in_a_plain_loop() -> None:
    model, optimizer, part = greedy(stage=0)
    loss_of(model, 0).backward()
    optimizer.step()
    part.where = "forward"
    with pytest.raises(torch.OutOfMemoryError) as caught:
        loss_of(model, 1)
    told = notes(caught.value)
    assert told.startswith("zeroshard: what held the memory of rank 0, in stage 0:")
    memory = zeroshard.stats(model).memory
    assert f"optimizer states {memory.optimizer_states / 1e6:.3g} MB" in told
    part.where = ""
    loss_of(model, 2).backward()  # and the model trains on
    optimizer.step()


@on_ranks(2)
def test_gathered_units_are_named_and_so_is_what_would_fit() -> None:
    model, _, part = greedy(stage=2)
    part.where = "forward"
    with pytest.raises(torch.OutOfMemoryError) as caught:
        loss_of(model, 0)
    assert "What would fit: stage=3 (" in notes(caught.value)
    model, _, part = greedy(stage=3)
    part.where = "forward"
    with pytest.raises(torch.OutOfMemoryError) as caught:
        loss_of(model, 0)
    told = notes(caught.value)
    assert "gathered parameters" in told
    assert "blocks.2" in told
    assert "No stage or offload would fit on 2 rank(s); it takes more ranks, a smaller batch" in told


def test_a_step_that_runs_out_of_memory_is_answered() -> None:
    class Hungry(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    model = net()
    model, optimizer = zeroshard.shard(model, Hungry(model.parameters()), elementwise=True)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert "what held the memory" in notes(caught.value)


def test_other_errors_are_left_alone() -> None:
    model, _, _ = greedy()
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(3, 3))
    assert not notes(caught.value)


def test_an_error_that_is_being_handled_is_not_taken_for_one_of_forward() -> None:
    model, _, _ = greedy()
    error = torch.OutOfMemoryError(OUT)
    try:
        raise error
    except torch.OutOfMemoryError:
        loss_of(model, 0)
    assert not notes(error)


@pytest.mark.slow
def test_the_allocator_is_observed_once_however_many_models_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    observers: list[Any] = []
    monkeypatch.setattr(shortage, "_observed", [])
    monkeypatch.setattr(compat, "watch_shortages", observers.append)

    def come_and_go() -> None:
        model, _, _ = greedy(stage=0)
        answer_of(model, "cuda:0")

    for _ in range(3):
        come_and_go()
        gc.collect()
        assert not shortage._answers
    assert len(observers) == 1


def test_an_answer_that_fails_does_not_take_the_place_of_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(answer: shortage.Answer) -> str:
        raise KeyError("lost")

    model, _, _ = greedy(stage=0)
    monkeypatch.setattr(shortage.Answer, "text", fails)
    monkeypatch.setattr(shortage, "_answers", {answer_of(model)})
    monkeypatch.setattr(compat, "in_backward", lambda: True)
    shortage._on_shortage(0, 1, 2, 3)
    assert "could not be told: KeyError: 'lost'" in capsys.readouterr().err


def test_the_allocators_word_is_passed_on_in_backward_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _, _ = greedy(stage=0)
    monkeypatch.setattr(shortage, "_answers", {answer_of(model)})
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10**9)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * 10**9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**8, 3 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    shortage._on_shortage(0, 1, 2, 3)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(compat, "in_backward", lambda: True)
    shortage._on_shortage(1, 1, 2, 3)
    assert capsys.readouterr().err == ""
    shortage._on_shortage(0, 1, 2, 3)
    told = capsys.readouterr().err
    assert "all else that torch had allocated 998 MB" in told
    assert "allocated 1 GB, reserved 2 GB, and 100 MB of 3 GB free" in told
    assert "1 GB were reserved and in no piece large enough; defragment=True" in told
    assert "set_per_process_memory_fraction" not in told
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.34)
    shortage._on_shortage(0, 1, 2, 3)
    assert "set_per_process_memory_fraction leaves 20 MB to this process" in capsys.readouterr().err
    assert sys.exception() is None
