"""What the loop trains, behind one interface: `gpt/task.py` is the built-in GPT, `language/task.py` Hugging Face's.

The loop knows steps, evaluations, checkpoints and the record. A task knows the model, its data and its loss, and what
remains of a run.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import RenderableType
from torch import Tensor, nn

from ..config.job import Job
from ..runtime import runtime_of
from .checkpoints import Origin
from .rank import Rank
from .record import Record


class Task(Protocol):
    """A model, the data that it is trained on, and the loss. Every rank has the same task."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Return what a resumed run must have in common with its checkpoint, beside the job's own tables."""

    def start(self, job: Job, origin: Origin | None, here: Rank) -> Job:
        """Begin a run, or resume it. Returns the job with what was left open filled in. Every rank calls this."""

    @property
    def headline(self) -> str:
        """Return what is trained, on what, in a few lines."""

    @property
    def tokens_a_step(self) -> int:
        """Return the tokens of all ranks in one step."""

    def build(self) -> nn.Module:
        """Return the model before it is sharded. Its parameters have no values yet, or few."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer that `shard()` is given."""

    def shard_options(self) -> dict[str, Any]:
        """Return the options that this rank gives to `shard()`."""

    def prepare(self, model: nn.Module) -> None:
        """Look at the sharded model once, before its first step. Every rank calls this."""

    def micro_batches(self, step: int) -> Sequence[Any]:
        """Return this rank's part of a step. Every rank has the same number."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return a micro-batch's part of the step's loss, which is the sum of a rank's parts, averaged over ranks."""

    def evaluate(self, model: nn.Module) -> float | None:
        """Return the mean loss on held-out data; None if there is none. Every rank calls this."""

    def sample_sharded(self, model: nn.Module) -> str | None:
        """Return text from the sharded model; None for none. Every rank calls this."""

    def save(self, model: nn.Module, out: Path) -> list[Path]:
        """Write the trained model. Every rank calls this. Returns the files, the main one last."""

    def sample_saved(self, out: Path, device: torch.device) -> str | None:
        """Return text from the saved model, which rank 0 has for itself; None for none."""

    def closing(self, record: Record, out: Path) -> Sequence[RenderableType]:
        """Return what ends the run's output: tables and lines."""


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return the optimizer's groups: matrices decay, biases and norms do not. Frozen parameters are in none."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def mean(model: nn.Module, value: Tensor) -> float:
    """Return the mean of a scalar over all ranks; every rank calls this. It waits for the device, not for ever."""
    return statistics.fmean(runtime_of(model).fabric.gather_objects(value.item()))


def shown(text: str) -> str:
    """Return sampled text as indented lines, without control characters, which a terminal would obey."""
    printable = "".join(sign if sign.isprintable() or sign == "\n" else "\ufffd" for sign in text)
    return "\n".join(f"    {line}" for line in printable.splitlines())
