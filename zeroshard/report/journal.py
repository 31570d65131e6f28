"""The journal of a run: what is recorded, how lines are written, and how a run is read back.

A journal is the file ``record.jsonl`` in the run's folder. Each line is a JSON object with a ``kind``:

    run         begins a run, or goes on with one: "format", "after" (steps made before), "began", "name", "stage",
                "offload", "precision", "ranks", "device", "parameters" (Ψ), "padded" (Ψ as communicated), ...
    step        "step", "seconds" since the step before, "loss", "lr", "tokens" of all ranks
    evaluation  "step", "loss" on held-out data
    memory      "step", bytes by kind on "device" and on "host" between backward and update, "peak" and "capacity"
    volume      "step", "elements" by collective, "expected" (in Ψ) and its "formula", bytes by direction on "host"
    plan        "rows": what the plan says of this setting ("own") and of other stages, in bytes, elements and seconds
    trace       "steps", "marks" (their borders, in seconds), "spans" of [lane, name, start, stop]
    ranks       "states" and "peak": the bytes that each rank had, in the order of ranks
    end         "step", "reason"

A line is written at once and never changed, so a crash costs the last line at most. A run that goes on adds a line
``run``: what stands above it about steps later than "after" no longer counts. Numbers that are not finite are the
strings "nan", "inf" and "-inf", because JSON has no others. A reader skips kinds and keys that it does not know.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

FILE = "record.jsonl"
FORMAT = 1
LONGEST_LINE = 32 << 20
"""Longer lines are damage."""
MOST_SPANS = 6000
"""More spans of a trace are left out, so that a page stays small."""
MOST_ROWS = 64
"""A plan has no more rows, and a trace no more steps."""
LONGEST_WORDS = 200
"""Longer texts are cut."""


class Step(NamedTuple):
    """One step. None is not known; a loss may be NaN or infinite."""

    step: int
    seconds: float | None
    loss: float | None
    lr: float | None
    tokens: float | None


class Span(NamedTuple):
    """Work on one lane, in seconds."""

    lane: str
    name: str
    start: float
    stop: float


class Evaluation(NamedTuple):
    """The loss on held-out data after a step."""

    step: int
    loss: float


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by kind."""

    device: dict[str, float]
    host: dict[str, float]
    peak: float | None = None
    """The most that was allocated on the device; None where that is not counted."""
    capacity: float | None = None
    """What the device has."""


@dataclass(frozen=True)
class Volume:
    """What one rank communicated in a step."""

    elements: dict[str, float]
    """By collective."""
    expected: float | None
    """By the formula, in Ψ."""
    formula: str
    host: dict[str, float]
    """Bytes between host and device, by direction."""


@dataclass(frozen=True)
class PlanRow:
    """What the plan says of one stage and offload."""

    stage: int
    offload: str
    own: bool
    """Whether it is the setting that runs."""
    fits: bool
    at_step: dict[str, float]
    peak: dict[str, float]
    host: float
    volume: float
    seconds: float | None


@dataclass(frozen=True)
class Plan:
    """The plan of a run."""

    rows: list[PlanRow]
    counts_activations: bool
    micro_batches: int

    @property
    def own(self) -> PlanRow | None:
        return next((row for row in self.rows if row.own), None)


@dataclass(frozen=True)
class Traced:
    """Some steps that were traced."""

    steps: list[int]
    marks: list[float]
    """The borders of the steps: one more than there are steps."""
    spans: list[Span]
    dropped: int
    """Spans that were left out."""


@dataclass
class Run:
    """What a journal says of a run."""

    name: str
    folder: str = ""
    head: dict[str, Any] = field(default_factory=dict)
    """The last line ``run``. Its values may be anything."""
    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    memory: Memory | None = None
    volume: Volume | None = None
    plan: Plan | None = None
    traced: Traced | None = None
    states_of_ranks: list[float] = field(default_factory=list)
    peaks_of_ranks: list[float] = field(default_factory=list)
    end: str | None = None
    """Why the run ended. None if it goes on, or if it was killed."""
    damaged: int = 0
    """Lines that could not be read."""
    starts: int = 0
    """How often the run began or went on."""

    def number(self, name: str) -> float | None:
        """A finite number of the line ``run``."""
        number = _number(self.head.get(name))
        return number if number is not None and math.isfinite(number) else None

    def text(self, name: str) -> str:
        """A text of the line ``run``, or nothing."""
        return _words(self.head.get(name))


class Journal:
    """A journal that is written. It goes on where the file ends.

    The file is ASCII: the name of a folder may hold bytes that are no UTF-8, which JSON can escape.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = (folder / FILE).open("a", encoding="utf-8")
        with (folder / FILE).open("rb") as before:  # a crash may have left a line without its end
            before.seek(0, 2)
            if before.tell():
                before.seek(-1, 2)
                if before.read(1) != b"\n":
                    self._file.write("\n")

    def write(self, kind: str, **values: object) -> None:
        """Adds a line, and hands it to the operating system."""
        self._file.write(json.dumps({"kind": kind, **_finite(values)}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Ends the journal."""
        self._file.close()


def _finite(value: Any) -> Any:
    """The same value, with strings in place of numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


# -- reading ------------------------------------------------------------------------------------------------------


def read(folder: str | Path) -> Run:
    """The run in a folder. Damaged lines are counted and left out.

    Raises:
        ValueError: there is no journal, or nothing of it can be read.
    """
    folder = Path(folder)
    file = folder if folder.is_file() else folder / FILE
    if not file.is_file():
        raise ValueError(
            f"{folder} has no {FILE}; `zeroshard train` and `zeroshard finetune` write one, and for a loop of your own "
            "`with zeroshard.record(model, folder) as run:` does"
        )
    run = Run(name=_readable(file.parent.absolute().name), folder=_readable(str(file.parent)))
    try:
        with file.open("rb") as lines:
            for line in _lines(lines):
                _take(run, line)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    if not run.starts and not run.damaged:
        raise ValueError(f"{file} is empty: no step of this run was made yet")
    if not run.starts:
        raise ValueError(f"{file} holds no line of a run ({run.damaged} line(s) cannot be read); it is damaged")
    if run.text("name"):
        run.name = run.text("name")
    return run


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    while line := file.readline(LONGEST_LINE):
        if line.strip():
            yield line


def _take(run: Run, line: bytes) -> None:
    """Adds a line to a run."""
    try:
        entry = json.loads(line)
        reader = _READERS.get(entry["kind"])
        if reader is not None:
            reader(run, entry)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        run.damaged += 1


def _take_run(run: Run, entry: dict[str, Any]) -> None:
    if entry["format"] != FORMAT:
        raise ValueError("another format")
    after = _whole(entry["after"])
    run.steps = [step for step in run.steps if step.step <= after]
    run.evaluations = [each for each in run.evaluations if each.step <= after and after]
    run.head, run.end = entry, None
    if not after:
        run.memory = run.volume = run.plan = run.traced = None
        run.starts = 0
    run.starts += 1


def _take_step(run: Run, entry: dict[str, Any]) -> None:
    numbers = (_number(entry.get(name)) for name in ("seconds", "loss", "lr", "tokens"))
    step = Step(_whole(entry["step"]), *numbers)
    if run.steps and step.step <= run.steps[-1].step:
        raise ValueError("steps run backwards")
    run.steps.append(step)


def _take_evaluation(run: Run, entry: dict[str, Any]) -> None:
    loss = _number(entry["loss"])
    if loss is not None:
        run.evaluations.append(Evaluation(_whole(entry["step"]), loss))


def _take_memory(run: Run, entry: dict[str, Any]) -> None:
    device, host = _sizes(entry["device"]), _sizes(entry.get("host") or {})
    run.memory = Memory(device, host, _size(entry.get("peak")), _size(entry.get("capacity")))


def _take_volume(run: Run, entry: dict[str, Any]) -> None:
    elements, host = _sizes(entry["elements"]), _sizes(entry.get("host") or {})
    run.volume = Volume(elements, _size(entry.get("expected")), _words(entry.get("formula")), host)


def _take_plan(run: Run, entry: dict[str, Any]) -> None:
    rows = [
        PlanRow(
            stage=_whole(row["stage"]),
            offload=_words(row["offload"]),
            own=row["own"] is True,
            fits=row["fits"] is True,
            at_step=_sizes(row["at_step"]),
            peak=_sizes(row["peak"]),
            host=_size(row["host"]) or 0.0,
            volume=_size(row["volume"]) or 0.0,
            seconds=_size(row.get("seconds")),
        )
        for row in entry["rows"][:MOST_ROWS]
    ]
    run.plan = Plan(rows, entry.get("counts_activations") is True, _whole(entry.get("micro_batches", 1)))


def _take_trace(run: Run, entry: dict[str, Any]) -> None:
    marks = [float(_known(mark)) for mark in entry["marks"]]
    steps = [_whole(step) for step in entry["steps"]]
    spans = [
        Span(_words(lane), _words(name), _known(start), _known(stop)) for lane, name, start, stop in entry["spans"]
    ]
    if (
        len(steps) > MOST_ROWS
        or len(marks) != len(steps) + 1
        or not steps
        or sorted(marks) != marks
        or marks[0] == marks[-1]
    ):
        raise ValueError("no steps")
    spans = [span for span in spans if span.start <= span.stop]
    dropped = _whole(entry.get("dropped", 0)) + max(0, len(spans) - MOST_SPANS)
    run.traced = Traced(steps, marks, spans[:MOST_SPANS], dropped)


def _take_ranks(run: Run, entry: dict[str, Any]) -> None:
    run.states_of_ranks = [_known(size) for size in entry["states"]]
    run.peaks_of_ranks = [_known(size) for size in entry.get("peak") or []]


def _take_end(run: Run, entry: dict[str, Any]) -> None:
    run.end = _words(entry["reason"])


_READERS = {
    "run": _take_run,
    "step": _take_step,
    "evaluation": _take_evaluation,
    "memory": _take_memory,
    "volume": _take_volume,
    "plan": _take_plan,
    "trace": _take_trace,
    "ranks": _take_ranks,
    "end": _take_end,
}


def _number(value: object) -> float | None:
    """A number, which may be NaN or infinite; None for anything else."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # an int of many digits
        return None


def _words(value: object) -> str:
    """A text that is not too long; nothing for anything else."""
    return _readable(value[:LONGEST_WORDS]) if isinstance(value, str) else ""


def _readable(text: str) -> str:
    """The same text, with "?" for what UTF-8 does not have, such as odd bytes in the name of a folder."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _known(value: object) -> float:
    number = _number(value)
    if number is None or not math.isfinite(number):
        raise ValueError("not a finite number")
    return number


def _size(value: object) -> float | None:
    number = _number(value)
    return number if number is not None and math.isfinite(number) and number >= 0 else None


def _sizes(value: dict[str, object]) -> dict[str, float]:
    return {str(kind): size for kind, each in value.items() if (size := _size(each)) is not None}


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 53:
        raise ValueError("not a count")
    return value
