"""Checkpoints of a training run: written every so often and when a run is told to stop, found again when it resumes."""

import os
import signal
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from torch import nn

import zeroshard

from ..config.job import Job
from ..runtime import runtime_of
from ..storage.background import Saving, abandon_all
from ..storage.folder import candidates
from ..storage.load import read_extra

FOLDER = "checkpoints"
AUTO, NEVER = "auto", "never"
STOP_FILE = "ZEROSHARD_STOP_FILE"  # environment variable: where rank 0 tells who started it that the run ended early
BY_SIGNAL = "SIGTERM"
KEPT = ("lr", "weight_decay")
"""Settings of `[train]` that a resumed run has from its optimizer's checkpoint, so that others would have no effect."""


class ResumeError(ValueError):
    """A run cannot go on from a checkpoint, with the remedy."""


@dataclass(frozen=True)
class Origin:
    """How a run divided its data when it began: it keeps seeing the same, however many ranks there are later."""

    ranks: int
    batch: int

    @classmethod
    def read(cls, value: Any) -> Self | None:
        """As a checkpoint has it; None if it is none."""
        if not isinstance(value, dict) or value.keys() != {"ranks", "batch"}:
            return None
        if any(type(number) is not int or number < 1 for number in value.values()):
            return None
        return cls(**value)

    def share(self, ranks: int) -> int:
        """Return the sequences of each rank when there are this many."""
        if self.ranks * self.batch % ranks:
            raise ResumeError(
                f"the run began with {self.ranks} × {self.batch} sequences a step, which {ranks} ranks cannot divide "
                "evenly; resume on another number of ranks"
            )
        return self.ranks * self.batch // ranks


@dataclass(frozen=True)
class Start:
    """Where a run begins: at its first step, or after the steps of a checkpoint."""

    job: Job
    origin: Origin
    path: Path | None = None
    """The checkpoint, or the folder of which the newest is taken."""

    @classmethod
    def find(cls, job: Job, out: Path, resume: str, ranks: int) -> "Start":
        """Look for what `--resume` asks for: `auto`, `never` or a path. Reads no tensor.

        Raises:
            ResumeError: the path holds none, or that of another job.
        """
        fresh = cls(job, Origin(ranks, job.train.batch))
        if resume == NEVER:
            return fresh
        path = out / FOLDER if resume == AUTO else Path(resume)
        if not candidates(path.absolute()):
            if resume != AUTO:
                raise ResumeError(f"--resume {resume}: no complete checkpoint there")
            return fresh
        saved = read_extra(path)
        if not isinstance(saved, dict) or "origin" not in saved:
            raise ResumeError(f"--resume {resume}: {path} is a checkpoint of another program")
        for name, mine in (("model", asdict(job.model)), ("data", asdict(job.data)), ("seed", job.train.seed)):
            if saved.get(name) != mine:
                raise ResumeError(f"--resume {resume}: the run had {name} = {saved.get(name)}, this job has {mine}")
        origin, step = Origin.read(saved["origin"]), saved.get("step")
        if origin is None or type(step) is not int or step < 0:
            raise ResumeError(
                f"--resume {resume}: {path} says of the run origin = {saved['origin']!r} and step = {step!r}, which "
                "are not ranks and a batch, and a count: it was edited, so resume from another"
            )
        share = origin.share(ranks)
        had = {name: saved[name] for name in KEPT if name in saved}
        now = {name: getattr(job.train, name) for name in KEPT}
        if job.train.batch != share:  # which asks for the same
            had, now = had | {"batch": origin.batch}, now | {"batch": job.train.batch}
        for name, value in had.items():
            if now[name] != value:
                raise ResumeError(
                    f"--resume {resume}: the run had train.{name} = {value}, this job has {now[name]}, which would "
                    f"have no effect, as a run goes on as it began; set train.{name}={value}, or begin another run in "
                    f"another folder, or here with --resume {NEVER}"
                )
        return cls(replace(job, train=replace(job.train, batch=share)), origin, path)


class Checkpoints:
    """Saves a run. Use as a context manager: inside it, SIGTERM asks for a checkpoint and an orderly end."""

    def __init__(self, start: Start, out: Path, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        self._start, self._job, self._folder = start, start.job, out / FOLDER
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._runtime = runtime_of(model)
        self._before: Any = None
        self._saving: Saving | None = None
        self.stopped: str | None = None
        """Why the run ended early; None if it did not."""

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)
        if error is not None:
            abandon_all()  # a rank that failed will not write its part, so nobody should wait for it

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._runtime.reducer.stop_asked = True  # the next step tells the other ranks

    def load(self) -> dict[str, Any] | None:
        """Go on from the checkpoint that was found; returns what it holds beside states, None at a first step."""
        if self._start.path is None:
            return None
        older = self._start.path == self._folder
        found: dict[str, Any] = zeroshard.load(
            self._start.path, self._model, self._optimizer, self._scheduler, allow_older=older
        )
        return found

    def after_step(self, step: int, journal: dict[str, Any]) -> bool:
        """Save if it is time to; return whether the run ends here. Every rank calls this after every step.

        A signal counts for all ranks from the first step that begins after it.
        """
        reason = BY_SIGNAL if self._runtime.reducer.stop_agreed else self._runtime.faults.stop_reason
        every = self._job.train.save_every
        if reason is not None or (every and step % every == 0):
            self._save(step, journal, asynchronous=reason is None)
        self.stopped = reason
        return reason is not None

    def finish(self) -> None:
        """Wait for the last checkpoint to be complete."""
        if self._saving is not None:
            self._saving.wait()

    def path_of(self, step: int) -> Path:
        """Return the folder of the checkpoint after a step."""
        return self._folder / f"step-{step:08}"

    def _save(self, step: int, journal: dict[str, Any], *, asynchronous: bool) -> None:
        extra = {
            "step": step,
            "origin": asdict(self._start.origin),
            "model": asdict(self._job.model),
            "data": asdict(self._job.data),
            "seed": self._job.train.seed,
            **{name: getattr(self._job.train, name) for name in KEPT},
            "journal": journal,
        }
        self._saving = zeroshard.save(
            self.path_of(step),
            self._model,
            self._optimizer,
            self._scheduler,
            extra=extra,
            asynchronous=asynchronous,
            keep=self._job.train.keep,
        )


def tell_launcher(reason: str) -> None:
    """Say to who started the ranks that the run ended early, and why."""
    if file := os.environ.get(STOP_FILE):
        Path(file).write_text(reason)
