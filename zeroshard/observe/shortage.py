"""The answer to an out-of-memory error: what used the memory, and which setting would fit.

An error in forward passes a hook of the model, and an error in ``step()`` passes our own code. There the answer is a
note on the exception. An error in backward is raised inside torch's engine, where no hook is called. On a GPU the
allocator calls us before it raises the error, and the answer is written to stderr, just above the error.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..states.unit import Unit
from ..system import compat
from ..system.device import available_memory
from ..system.hook import Hook
from ..system.sizes import size_text
from .ledger import Ledger, Memory

TITLE = "zeroshard: what held the memory"
NAMED = 4
"""At most this many units are named."""
FRAGMENTED = 0.1
"""From this share of unused reserved memory on, the answer mentions fragmentation."""
SIGNS = ("out of memory", "can't allocate memory")
"""Texts of out-of-memory errors that are not ``torch.OutOfMemoryError``: from the CPU allocator, from CUDA calls."""

_answers: weakref.WeakSet[Answer] = weakref.WeakSet()
"""The answers of all models on GPUs."""
_observed: list[bool] = []
"""Not empty once the allocator calls us. It then does so until the process ends."""


def is_shortage(error: BaseException | None) -> bool:
    """Whether an error is an out-of-memory error."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


class Answer:
    """What one sharded model says when memory runs out."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], ledger: Ledger, *, title: str, device: torch.device
    ) -> None:
        self._units, self._ledger, self._title, self.device = units, ledger, title, device
        self.suggest: Callable[[int | None, int], str] | None = None
        """Says which setting would fit, given the device's capacity and the bytes that are not model states."""
        model.register_forward_hook(Hook(self.after_forward), always_call=True)
        if device.type == "cuda":
            if not _observed:
                _observed.append(True)
                compat.watch_shortages(_on_shortage)
            _answers.add(self)

    def after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        """Adds the answer to an exception of forward. After an exception the hook is called without an output."""
        error = sys.exception() if output is None else None
        if error is not None:
            self.note(error)

    def note(self, error: BaseException) -> None:
        """Adds the answer to an exception, once."""
        if is_shortage(error) and not any(note.startswith(TITLE) for note in getattr(error, "__notes__", ())):
            error.add_note(self.text())

    def text(self) -> str:
        """What uses the memory now, and which setting would fit."""
        memory = self._ledger.now()
        lines = [f"{TITLE} of {self._title}:"]
        lines.append(f"  model states {size_text(memory.model_states)}: {_kinds(memory)}")
        if memory.gathered:
            lines.append(f"  gathered parameters {size_text(memory.gathered)}: {self._gathered_units()}")
        for name, size in (("accumulators", memory.accumulators), ("buffers of the model", memory.buffers)):
            if size:
                lines.append(f"  {name} {size_text(size)}")
        others = 0
        if self.device.type == "cuda":
            found, others = _allocator(self.device, memory.total)
            lines += found
        lines.append("  " + self._suggestion(others))
        return "\n".join(lines)

    def _gathered_units(self) -> str:
        names = [unit.title for unit in self._units if unit.present and any(f.sharded for f in unit.flats)]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return ", ".join(names[:NAMED]) + more

    def _suggestion(self, others: int) -> str:
        if self.suggest is None:
            return "Which setting would fit was not planned: this was a dry run."
        capacity = None
        if self.device.type == "cuda":
            capacity = available_memory(self.device) + torch.cuda.memory_allocated(self.device)
        return self.suggest(capacity, others)


def _on_shortage(device: int, requested: int, allocated: int, free: int) -> None:
    """Writes the answers to stderr, if this is a backward; elsewhere the exception gets a note.

    Torch's allocator calls this before it raises the error, on the thread that asked for memory.
    """
    if not compat.in_backward():
        return
    for answer in list(_answers):
        try:
            if answer.device.index == device:
                print(answer.text(), file=sys.stderr, flush=True)
        except Exception as error:  # otherwise it would be raised in place of the out-of-memory error
            print(f"{TITLE} could not be told: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _allocator(device: torch.device, known: int) -> tuple[list[str], int]:
    """Lines about torch's allocator, and how many bytes it has allocated beyond the ledger's ``known`` bytes."""
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    free, whole = torch.cuda.mem_get_info(device)
    usable = available_memory(device)
    others = max(0, allocated - known)
    lines = [
        f"  all else that torch had allocated {size_text(others)}: "
        "activations, and what loss, backward or update were at",
        f"  allocated {size_text(allocated)}, reserved {size_text(reserved)}, "
        f"and {size_text(free)} of {size_text(whole)} free",
    ]
    if usable < free:
        lines.append(f"  set_per_process_memory_fraction leaves {size_text(usable)} to this process")
    if reserved - allocated > FRAGMENTED * reserved:
        lines.append(
            f"  {size_text(reserved - allocated)} were reserved and in no piece large enough; "
            "defragment=True (torch's expandable segments) often helps"
        )
    return lines, others


def _kinds(memory: Memory) -> str:
    kinds = ("parameters", "gradients", "optimizer_states")
    return ", ".join(f"{kind.replace('_', ' ')} {size_text(getattr(memory, kind))}" for kind in kinds)
