"""Turning expandable segments on, on a machine whose allocator is a record of calls."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from zeroshard.system import allocator, compat

GPU = torch.device("cuda", 0)


@dataclass
class Allocator:
    """Stands for the CUDA allocator."""

    backend: str = "native"
    expand: bool = False
    """Whether expandable segments are on."""
    supported: bool = True
    used: int = 0
    """Bytes of segments that are in use."""
    cached: int = 0
    """Bytes of segments that nothing uses."""
    calls: list[str] = field(default_factory=list)

    def turn_on(self) -> None:
        self.calls.append("on")
        self.expand = self.supported

    def empty(self) -> None:
        self.cached = 0


def defragment(state: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: state.backend)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: state.used + state.cached)
    monkeypatch.setattr(torch.cuda, "empty_cache", state.empty)
    monkeypatch.setattr(compat, "segments_expand", lambda: state.expand)
    monkeypatch.setattr(compat, "expand_segments", state.turn_on)
    allocator.defragment(GPU)


@pytest.mark.parametrize("cached", [0, 1 << 21])
def test_it_is_turned_on_while_no_memory_is_in_use(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state = Allocator(cached=cached)
    defragment(state, monkeypatch)
    assert state.calls == ["on"]


def test_what_the_environment_turned_on_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    state = Allocator(expand=True, used=1 << 30)
    defragment(state, monkeypatch)
    assert not state.calls


@pytest.mark.parametrize(
    ("state", "match"),
    [
        (
            Allocator(used=3 << 20),
            r"comes too late: this process uses 3.15 MB of cuda:0 .* meta device, or start the process with "
            r"PYTORCH_ALLOC_CONF=expandable_segments:True",
        ),
        (Allocator(backend="cudaMallocAsync"), "no effect on the cudaMallocAsync allocator; leave one of them out"),
        (Allocator(supported=False), "this torch has no expandable segments; leave it out"),
    ],
)
def test_what_comes_too_late_or_has_no_effect_is_refused(
    state: Allocator, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=f"defragment=True .*{match}"):
        defragment(state, monkeypatch)
