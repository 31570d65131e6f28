"""Checkpoints of a training run: saved every few steps and when a signal stops the run, loaded when the run resumes."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from torch import nn

import zeroshard

from ..config.finetune import LanguageModelConfig
from ..config.job import FinetuneConfig, Job
from ..runtime import runtime_of
from ..storage.background import Saving, abandon_all
from ..storage.folder import candidates
from ..storage.load import read_extra
from .stopping import BY_SIGNAL, StopSignals, leave_closed_output

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
    micro_batches: int = 1

    @classmethod
    def of(cls, job: Job, ranks: int) -> "Origin":
        """Return the origin of a run that begins now."""
        return cls(ranks, job.train.batch, job.train.micro_batches)

    @classmethod
    def read(cls, value: Any) -> Self | None:
        """Return the origin that a checkpoint stores; None if the value is not an origin."""
        if not isinstance(value, dict) or value.keys() | {"micro_batches"} != {"ranks", "batch", "micro_batches"}:
            return None
        if any(type(number) is not int or number < 1 for number in value.values()):
            return None
        return cls(**value)

    def share(self, ranks: int, job: Job) -> tuple[int, int]:
        """Return the batch and the micro-batches of each rank, with this number of ranks.

        A job may say those of the first start, or some for its own ranks. With several micro-batches at the first
        start, a batch does not become larger by itself, because there may be no memory for a larger one.
        """
        whole = self.ranks * self.batch * self.micro_batches
        each = whole // ranks
        if whole % ranks:
            raise ResumeError(
                f"the run began with {self.ranks} × {self.batch * self.micro_batches} sequences a step, which {ranks} "
                "ranks cannot divide evenly; resume on another number of ranks"
            )
        asked = job.train.batch, job.train.micro_batches
        if asked[0] * asked[1] == each:
            return asked
        if asked != (self.batch, self.micro_batches):
            name = "batch" if asked[0] != self.batch else "micro_batches"
            raise _no_effect(f"train.{name}", getattr(self, name), getattr(job.train, name))
        if self.micro_batches == 1:
            return each, 1
        batch = next(size for size in range(min(each, self.batch), 0, -1) if each % size == 0)
        return batch, each // batch


@dataclass(frozen=True)
class Start:
    """Where a run begins: at its first step, or after the steps of a checkpoint."""

    job: Job
    origin: Origin | None
    """None if the sequences of a step do not depend on ranks and batch."""
    path: Path | None = None
    """A checkpoint, or a folder of checkpoints, whose newest one is loaded."""
    identity: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """What the run has in common with every run that resumes it."""

    @classmethod
    def find(
        cls, job: Job, out: Path, resume: str, ranks: int, more: Mapping[str, Any] = MappingProxyType({})
    ) -> "Start":
        """Find the checkpoint that `--resume` asks for: `auto`, `never` or a path. Reads no tensor.

        `more` is what a checkpoint must have in common with this run, beside what the job says.

        Raises:
            ResumeError: the path has no checkpoint, or a checkpoint of another job.
        """
        divides = not isinstance(job.train, FinetuneConfig)
        identity = _identity(job) | dict(more)
        fresh = cls(job, Origin.of(job, ranks) if divides else None, identity=identity)
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
        if differing := [text for name, mine in identity.items() for text in _differing(name, saved.get(name), mine)]:
            raise ResumeError(
                f"--resume {resume}: {'; '.join(differing)}. Go on with what the run had, or begin another run in "
                "another folder (--out)"
            )
        origin, step = Origin.read(saved["origin"]), saved.get("step")
        if (origin is None and divides) or type(step) is not int or step < 0:
            raise ResumeError(
                f"--resume {resume}: {path} says of the run origin = {saved['origin']!r} and step = {step!r}, which "
                "are not ranks and a batch, and a count: it was edited, so resume from another"
            )
        try:
            for name in FIXED:
                if name in saved and getattr(job.train, name) != saved[name]:
                    raise _no_effect(f"train.{name}", saved[name], getattr(job.train, name))
            if origin is not None:
                batch, micro_batches = origin.share(ranks, job)
                job = replace(job, train=replace(job.train, batch=batch, micro_batches=micro_batches))
        except ResumeError as error:
            raise ResumeError(f"--resume {resume}: {error}") from None
        return cls(job, origin, path, identity)


def _differing(name: str, had: object, mine: object) -> Iterator[str]:
    """One text for each value that differs. Tables are compared key by key."""
    if isinstance(had, dict) and isinstance(mine, dict):
        for key in mine | had:
            yield from _differing(f"{name}.{key}", had.get(key), mine.get(key))
    elif had != mine:
        yield f"the run had {name} = {had}, this job has {mine}"


def _no_effect(name: str, had: object, mine: object) -> ResumeError:
    return ResumeError(
        f"the run had {name} = {had}, this job has {mine}, which would have no effect, as a run goes on as it began; "
        f"set {name}={had}, or begin another run in another folder, or here with --resume {NEVER}"
    )


def _identity(job: Job) -> dict[str, Any]:
    """Return what a job must have in common with the run that it resumes."""
    fixed = {"tokens_per_step": job.train.tokens_per_step} if isinstance(job.train, FinetuneConfig) else {}
    return {"model": asdict(job.model), "data": asdict(job.data), "seed": job.train.seed, **fixed}


class RunCheckpoints:
    """Saves a run. Use as a context manager: inside it, a signal asks for a checkpoint and an orderly end."""

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
        if reason is not None:
            leave_closed_output()
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
        origin = None if self._start.origin is None else asdict(self._start.origin)
        extra = {"step": step, "origin": origin, "journal": record, **self._start.identity, **fixed}
        adapters = isinstance(job.model, LanguageModelConfig) and job.model.lora > 0
        self._saving = zeroshard.save(
            self.path_of(step),
            *self._states,
            extra=extra,
            asynchronous=asynchronous,
            keep=job.train.keep,
            frozen=not adapters,  # a run that resumes reads the base from the model's files again
        )
