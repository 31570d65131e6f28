"""Checkpoints of a training run: saved every few steps and when a signal stops the run, loaded when the run resumes."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from torch import nn

import zeroshard

from ..config.job import Job
from ..runtime import runtime_of
from ..storage.background import Saving, abandon_all
from ..storage.folder import candidates
from ..storage.load import read_extra
from .stopping import BY_SIGNAL, StopSignals

FOLDER = "checkpoints"
AUTO, NEVER = "auto", "never"
FIXED = ("lr", "weight_decay")
"""Settings of `[train]` that a resumed run takes from the checkpoint of its optimizer. Other values have no effect."""


class ResumeError(ValueError):
    """A run cannot resume from a checkpoint. The message says what to do."""


@dataclass(frozen=True)
class Origin:
    """How a run divided its data when it began. A resumed run sees the same sequences on any number of ranks."""

    ranks: int
    batch: int

    @classmethod
    def read(cls, value: Any) -> Self | None:
        """Return the origin that a checkpoint stores; None if the value is not an origin."""
        if not isinstance(value, dict) or value.keys() != {"ranks", "batch"}:
            return None
        if any(type(number) is not int or number < 1 for number in value.values()):
            return None
        return cls(**value)

    def share(self, ranks: int) -> int:
        """Return how many sequences each rank gets in a step, with this number of ranks."""
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
    """A checkpoint, or a folder of checkpoints, whose newest one is loaded."""

    @classmethod
    def find(cls, job: Job, out: Path, resume: str, ranks: int) -> "Start":
        """Find the checkpoint that `--resume` asks for: `auto`, `never` or a path. Reads no tensor.

        Raises:
            ResumeError: the path has no checkpoint, or a checkpoint of another job.
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
        for name, mine in _identity(job).items():
            if saved.get(name) != mine:
                raise ResumeError(f"--resume {resume}: the run had {name} = {saved.get(name)}, this job has {mine}")
        origin, step = Origin.read(saved["origin"]), saved.get("step")
        if origin is None or type(step) is not int or step < 0:
            raise ResumeError(
                f"--resume {resume}: {path} says of the run origin = {saved['origin']!r} and step = {step!r}, which "
                "are not ranks and a batch, and a count: it was edited, so resume from another"
            )
        share = origin.share(ranks)
        had = {name: saved[name] for name in FIXED if name in saved}
        if job.train.batch != share:  # a job may give the batch of the first start, or the batch of its own ranks
            had["batch"] = origin.batch
        for name, value in had.items():
            mine = getattr(job.train, name)
            if mine != value:
                raise ResumeError(
                    f"--resume {resume}: the run had train.{name} = {value}, this job has {mine}, which would "
                    f"have no effect, as a run goes on as it began; set train.{name}={value}, or begin another run in "
                    f"another folder, or here with --resume {NEVER}"
                )
        return cls(replace(job, train=replace(job.train, batch=share)), origin, path)


def _identity(job: Job) -> dict[str, Any]:
    """Return what a job must have in common with the run that it resumes."""
    return {"model": asdict(job.model), "data": asdict(job.data), "seed": job.train.seed}


class RunCheckpoints:
    """Saves a run. Use as a context manager: inside it, SIGTERM or SIGHUP asks for a checkpoint and an orderly end."""

    def __init__(self, start: Start, out: Path, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        self._start, self._folder = start, out / FOLDER
        self._states = model, optimizer, scheduler
        self._runtime = runtime_of(model)
        self._signals = StopSignals(self._ask_to_stop)
        self._saving: Saving | None = None
        self.stopped: str | None = None
        """Why the run ended early; None if it did not."""
        self.stopped_by_signal = False

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._signals.__exit__()
        if error is not None:
            abandon_all()  # a rank that failed will not write its part, so no rank should wait for it

    def _ask_to_stop(self) -> None:
        self._runtime.reducer.stop_asked = True  # the next step tells the other ranks

    def load(self) -> dict[str, Any] | None:
        """Load the checkpoint of the start. Returns its `extra`; None if the run begins at the first step."""
        if self._start.path is None:
            return None
        older = self._start.path == self._folder
        found: dict[str, Any] = zeroshard.load(self._start.path, *self._states, allow_older=older)
        return found

    def after_step(self, step: int, record: dict[str, Any]) -> bool:
        """Save if it is time to; return whether the run ends here. Every rank calls this after every step.

        A signal counts for all ranks from the first step that begins after it.
        """
        self.stopped_by_signal = self._runtime.reducer.stop_agreed
        reason = self._runtime.faults.stop_reason
        if self.stopped_by_signal:
            reason = self._signals.received or f"{BY_SIGNAL} to another rank"
        every = self._start.job.train.save_every
        if reason is not None or (every and step % every == 0):
            self._save(step, record, asynchronous=reason is None)
        self.stopped = reason
        return reason is not None

    def finish(self) -> None:
        """Wait until the last checkpoint is complete."""
        if self._saving is not None:
            self._saving.wait()

    def path_of(self, step: int) -> Path:
        """Return the folder of the checkpoint after a step."""
        return self._folder / f"step-{step:08}"

    def _save(self, step: int, record: dict[str, Any], *, asynchronous: bool) -> None:
        job = self._start.job
        fixed = {name: getattr(job.train, name) for name in FIXED}
        # On disk the record is called "journal", as in checkpoints of earlier versions.
        extra = {"step": step, "origin": asdict(self._start.origin), "journal": record} | _identity(job) | fixed
        self._saving = zeroshard.save(
            self.path_of(step), *self._states, extra=extra, asynchronous=asynchronous, keep=job.train.keep
        )
