"""Out of memory: what held it, and which setting would fit.

A forward that fails passes the model's hook, and a step is a call of ours: there the answer is a note on the exception.
A backward fails inside torch's engine, where no hook is called; on a GPU its allocator tells of it first, and the
answer is written to stderr, just above the error.
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
from ..system.hook import Hook
from ..system.sizes import size_text
from .ledger import Ledger, Memory

TITLE = "zeroshard: what held the memory"
NAMED = 4
"""Units that are named, at most."""
FRAGMENTED = 0.1
"""Share of torch's memory that is reserved and not in use, from which on it is worth a word."""
SIGNS = ("out of memory", "can't allocate memory")
"""How errors say it that are no ``OutOfMemoryError``: of the CPU's allocator, of CUDA's own calls."""

_answers: weakref.WeakSet[Answer] = weakref.WeakSet()
_observed: list[bool] = []
"""Not empty once torch's allocator calls us, which it then does as long as the process lives."""


def is_shortage(error: BaseException | None) -> bool:
    """Whether an error says that memory ran out."""
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
        """Says which setting would fit, for the device's capacity and the bytes beside model states."""
        model.register_forward_hook(Hook(self.after_forward), always_call=True)
        if device.type == "cuda":
            if not _observed:
                _observed.append(True)
                compat.watch_shortages(_on_shortage)
            _answers.add(self)

    def after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        """Called also when forward has raised; then there is no output, and its exception is being handled."""
        error = sys.exception() if output is None else None
        if error is not None:
            self.note(error)

    def note(self, error: BaseException) -> None:
        """Adds the answer to an exception, once."""
        if is_shortage(error) and not any(note.startswith(TITLE) for note in getattr(error, "__notes__", ())):
            error.add_note(self.text())

    def text(self) -> str:
        """What holds the memory now, and what would fit instead."""
        held = self._ledger.now()
        lines = [f"{TITLE} of {self._title}:"]
        lines.append(f"  model states {size_text(held.model_states)}: {_kinds(held)}")
        if held.gathered:
            lines.append(f"  gathered parameters {size_text(held.gathered)}: {self._gathered_units()}")
        for name, size in (("accumulators", held.accumulators), ("buffers of the model", held.buffers)):
            if size:
                lines.append(f"  {name} {size_text(size)}")
        beside = 0
        if self.device.type == "cuda":
            told, beside = _allocator(self.device, held.total)
            lines += told
        lines.append("  " + self._suggestion(beside))
        return "\n".join(lines)

    def _gathered_units(self) -> str:
        names = [unit.title for unit in self._units if unit.present and any(f.sharded for f in unit.flats)]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return ", ".join(names[:NAMED]) + more

    def _suggestion(self, beside: int) -> str:
        if self.suggest is None:
            return "Which setting would fit was not planned: this was a dry run."
        capacity = None
        if self.device.type == "cuda":
            capacity = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        return self.suggest(capacity, beside)


def _on_shortage(device: int, requested: int, allocated: int, free: int) -> None:
    """By torch's allocator, on whatever thread asked for memory, before the error is raised.

    In backward alone: elsewhere the exception gets a note.
    """
    if not compat.in_backward():
        return
    for answer in list(_answers):
        try:
            if answer.device.index == device:
                print(answer.text(), file=sys.stderr, flush=True)
        except Exception as error:  # would be raised in place of the OutOfMemoryError
            print(f"{TITLE} could not be told: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _allocator(device: torch.device, held: int) -> tuple[list[str], int]:
    """What torch's allocator says, and the bytes beside what a sharded model knows of."""
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    free, whole = torch.cuda.mem_get_info(device)
    beside = max(0, allocated - held)
    lines = [
        f"  all else that torch had allocated {size_text(beside)}: "
        "activations, and what loss, backward or update were at",
        f"  allocated {size_text(allocated)}, reserved {size_text(reserved)}, "
        f"and {size_text(free)} of {size_text(whole)} free",
    ]
    if reserved - allocated > FRAGMENTED * reserved:
        lines.append(
            f"  {size_text(reserved - allocated)} were reserved and in no piece large enough; "
            "PYTORCH_ALLOC_CONF=expandable_segments:True often helps"
        )
    return lines, beside


def _kinds(held: Memory) -> str:
    kinds = ("parameters", "gradients", "optimizer_states")
    return ", ".join(f"{kind.replace('_', ' ')} {size_text(getattr(held, kind))}" for kind in kinds)
