"""Loggers: libraries that draw curves of a run's scalars. Each is imported only if the run names it (`train.log`)."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from .audience import Audience
from .events import Evaluation, Event, RunStart, StepEvent

PROJECT = "zeroshard"
SCALARS_ONLY = {
    "console": "off",
    "save_code": False,
    "disable_git": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
"""Settings of W&B, which would otherwise upload what is printed, the code's state and facts about the machine."""


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """What a logger is told of a run before its first scalar."""

    name: str
    folder: Path
    """Where the run writes."""
    step: int
    """The steps that were made before: above 0 if the run goes on from a checkpoint."""
    settings: Mapping[str, Any]
    """The tables `[train]` and `[shard]`, and the sizes of the run. No paths of data."""


class Logger(Protocol):
    """One library. `open` may raise, and says what to do."""

    def open(self, run: LoggedRun) -> None:
        """Begin, or go on where a resumed run was."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add values of a step. Steps do not go down."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """Event files in `tensorboard` in the run's folder."""

    def open(self, run: LoggedRun) -> None:
        """Begin a file. Later steps of an earlier try, which older files may have, are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        purged = run.step + 1 if run.step else 0
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purged, flush_secs=10)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases: scalars and settings, and nothing of the console, the code or the machine's load.

    `WANDB_PROJECT`, `WANDB_MODE=offline` and its other variables count.
    """

    def open(self, run: LoggedRun) -> None:
        """Begin a run. A resumed one goes on in the run whose id is in the folder."""
        wandb: Any = import_module("wandb")
        known = run.folder / "wandb-run"
        former = known.read_text().strip() if run.step and known.exists() else None
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", run.name),
            dir=str(run.folder),
            config=dict(run.settings),
            id=former,
            resume="allow" if former else None,
            settings=wandb.Settings(**SCALARS_ONLY),
        )
        known.write_text(self._run.id)
        self._run.define_metric("*", step_metric="step")  # else steps of a resumed run could not be logged again

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Trackio:
    """A run of trackio, which writes to a database of this machine unless `TRACKIO_SPACE_ID` names a place."""

    def open(self, run: LoggedRun) -> None:
        """Begin a run, or go on in the run of this name."""
        self._trackio: Any = import_module("trackio")
        self._trackio.init(
            project=PROJECT,
            name=run.name,
            config=dict(run.settings),
            resume="allow" if run.step else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._trackio.finish()


CLASSES: Mapping[str, Callable[[], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
"""By the name that `train.log` has for it, which is also the name of the library that is imported."""


class LoggerSink:
    """Gives the scalars of events to a logger, which was opened."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    def receive(self, event: Event) -> None:
        """Log the numbers of a step or of an evaluation."""
        if isinstance(event, StepEvent | Evaluation):
            self._logger.scalars(event.step, scalars_of(event))

    def close(self) -> None:
        """Close the logger."""
        self._logger.close()


def add_loggers(audience: Audience, names: Iterable[str], run: LoggedRun) -> None:
    """Open loggers, and add them to an audience.

    A logger that cannot be opened ends a new run, whose user is there to read why. A resumed run goes on without it.

    Raises:
        RuntimeError: naming the logger and the cause.
    """
    for name in names:
        logger = CLASSES[name]()
        try:
            logger.open(run)
        except Exception as error:
            if not run.step:
                raise RuntimeError(
                    f"train.log: {name} could not begin a run ({type(error).__name__}: {error}); mend that, or leave "
                    f"{name} out"
                ) from error
            audience.drop(name, error)
        else:
            audience.add(name, LoggerSink(logger))


def settings_of(start: RunStart, train: Mapping[str, Any], shard: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that loggers show beside the curves."""
    sizes = {name: getattr(start, name) for name in ("stage", "ranks", "precision", "parameters", "tokens_per_step")}
    return {**sizes, "train": _plain(train), "shard": _plain(shard)}


def scalars_of(event: StepEvent | Evaluation) -> dict[str, float]:
    """Return the curves' values by name.

    >>> scalars_of(Evaluation(step=4, held_out_loss=2.5))
    {'held_out_loss': 2.5}
    """
    known = {"step", "of", "seconds_left", *(["held_out_loss"] if isinstance(event, StepEvent) else [])}
    return {name: value for name, value in _flat(asdict(event)) if name not in known}


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """Yield numbers by path, as `device_memory/parameters`. Kinds of memory that are not there have no curve."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((path, number) for path, number in _flat(value, f"{before}{name}/") if number)
        elif value is not None:
            yield before + name, value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
