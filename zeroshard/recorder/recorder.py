"""Records a run: a hook of the optimizer's ``step()`` that writes lines, and a trace of a few steps now and then."""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from ..report import journal, page
from ..runtime import Runtime, runtime_of
from ..system import trace
from .facts import memory_facts, run_facts, trace_facts, volume_facts
from .late import Late, LateNumbers

REPORT = "report.html"
TRACED_STEPS = 3
TRACED_AFTER = (4, 64, 1024)
"""After so many steps of this process some steps are traced. The latest trace counts."""


@dataclass
class _Line:
    """A step whose line is not written yet: a value of it may still come."""

    step: int
    seconds: float | None
    values: dict[str, Late] = field(default_factory=dict)
    """What is known beside: "lr", "tokens" and "loss", numbers that may come later."""


@dataclass
class _Tracing:
    """A trace of some steps that goes on."""

    recording: trace.Trace
    first: int
    left: int = field(default=TRACED_STEPS)


class Recorder:
    """Writes what happens to a sharded model to a journal in a folder. Use as a context manager, once, on all ranks.

    Whatever fails while the run is recorded ends the recording with a warning, and the training goes on.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path,
        *,
        tokens: int | None = None,
        batch: int | None = None,
        name: str = "",
        say: Callable[[str], object] | None = None,
    ) -> None:
        """``tokens`` of all ranks in a step; ``batch``: samples of a rank in a micro-batch, which advice speaks of.

        ``say`` is called on rank 0 with the path of the report.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"record: a {type(model).__name__} is no model; pass the model that zeroshard.shard() returned"
            )
        self._runtime: Runtime = runtime_of(model)
        if self._runtime.optimizer is None:
            raise ValueError("this model was sharded without an optimizer, so it makes no steps that could be recorded")
        self._optimizer = self._runtime.optimizer
        self.folder, self._name, self._say = Path(folder), name, say
        self._tokens, self._batch = (None if count is None else int(count) for count in (tokens, batch))
        self.report: Path | None = None
        """The page, once the block has ended. On rank 0 only."""
        self.reason = "finished"
        """Why the run ends, if no error ends it. A loop that stops early says so here."""
        self._inside = self._used = False
        """Whether the block goes on, and whether it has begun."""
        self._writes = self._runtime.fabric.rank == 0
        self._journal: journal.Journal | None = None
        self._late = LateNumbers(self._runtime.fabric.device)
        self._lines: deque[_Line] = deque()
        self._before: list[dict[str, Any]] = []
        """Evaluations before the first step, which come after the line that begins the run."""
        self._early: dict[str, Late] = {}
        self._made = self._last_step = 0
        self._backwards = self._runtime.reducer.backwards
        self._forwards = self._runtime.schedule.forwards
        self._sees_forwards = False
        """Whether the last step had a training forward: a model in eval mode can be trained as well."""
        self._last, self._paused = time.perf_counter(), 0.0
        self._disturbed = False
        """There was a pause since the last step. What it communicated counts for the step after it."""
        self._tracing: _Tracing | None = None
        self._wants_trace = False
        self._next_look = 2

    # -- what a loop calls ----------------------------------------------------------------------------------------

    def log(self, *, loss: Any = None, lr: Any = None, tokens: Any = None) -> None:
        """Adds values to a step: before ``step()`` to the one that comes, after it to the one that was made.

        Each may be a tensor of the device: it is read later, without waiting. The learning rate of the first group
        is recorded anyway. ``tokens`` are those of all ranks in this step.
        """
        self._check_inside("log")
        if self._journal is None:
            return
        given = self._taken(loss=loss, lr=lr, tokens=tokens)
        if self._next_has_begun("loss" in given):
            self._early.update(given)
        else:
            self._lines[-1].values.update(given)

    def _next_has_begun(self, has_loss: bool) -> bool:
        """Whether what is logged now belongs to the step that comes."""
        runtime = self._runtime
        if not self._lines or runtime.reducer.backwards != self._backwards:
            return True
        if self._sees_forwards:
            return runtime.schedule.forwards != self._forwards
        return has_loss and "loss" in self._lines[-1].values

    def _taken(self, **values: Any) -> dict[str, Late]:
        """The numbers among these values, which are now on their way to the host."""
        taken = {name: self._late.take(value, name) for name, value in values.items() if value is not None}
        return {name: late for name, late in taken.items() if late is not None}

    def _check_inside(self, call: str) -> None:
        if not self._inside:
            raise RuntimeError(
                f"{call}() outside the block of this recorder records nothing; write `with zeroshard.record(model, "
                f"folder) as run:` around the loop, and call run.{call}() inside"
            )

    def evaluated(self, loss: float, step: int | None = None) -> None:
        """Adds a loss on held-out data, after the last step or after ``step``."""
        self._check_inside("evaluated")
        line = {"step": self._optimizer.steps if step is None else step, "loss": float(loss)}
        if self._made:
            self._write("evaluation", **line)
        else:
            self._before.append(line)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time of this block, such as an evaluation or a save, belongs to no step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - began
            self._disturbed = True

    # -- the block ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._used:
            raise RuntimeError("this recorder was used; call zeroshard.record() again, and the record goes on")
        self._used = True
        self._open()
        self._hook = self._optimizer.register_step_post_hook(self._after_step)
        self._inside = True
        self._last, self._paused = time.perf_counter(), 0.0
        return self

    def _open(self) -> None:
        """Opens the journal. All ranks learn whether rank 0 could."""
        problem = None
        if self._writes:
            try:
                self._journal = journal.Journal(self.folder)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        try:
            told = self._runtime.fabric.gather_objects(problem, "the start of zeroshard.record(), called on all ranks")
        except BaseException:
            self._close()
            raise
        if told[0] is not None:
            raise OSError(f"record: cannot write to {self.folder} ({told[0]}); choose another folder")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._hook.remove()
        self._inside = False
        try:
            self._end(kind)
        finally:
            self._close()
            self._lines.clear()
            self._early.clear()
            del self._hook, self._runtime, self._optimizer, self._late  # the user may keep the recorder for its path

    def _end(self, kind: type[BaseException] | None) -> None:
        """Writes what is left. After an error of the user's nothing here waits for the device or raises another."""
        tracing, ranks, mine = self._tracing, None, None
        try:
            if kind is None:
                self._end_trace()
            mine = memory_facts(self._runtime)
        except Exception as error:
            if kind is None:
                self._stop(error)
        finally:
            if tracing is not None:
                trace.drop(tracing.recording)
                self._tracing = None
        if kind is None:  # a collective: after an error the other ranks may not come
            facts = None if mine is None else (sum(mine["device"].values()), mine["peak"])
            ranks = self._runtime.fabric.gather_objects(facts)
        if self._journal is None or not self._made:
            return
        try:
            with suppress(RuntimeError):  # after an error of the device nothing more can be read
                self._write_lines(wait=kind is None)
            if mine is not None:
                self._write("memory", step=self._optimizer.steps, **mine)
            if ranks is not None and None not in ranks:
                peaks = [peak for _, peak in ranks if peak is not None]
                self._write("ranks", states=[states for states, _ in ranks], peak=peaks)
            reason = self.reason if kind is None else f"ended by {kind.__name__}"
            self._write("end", step=self._optimizer.steps, reason=reason)
        except Exception as error:
            self._stop(error)
            return
        self._close()
        self._write_report()

    def _close(self) -> None:
        closing, self._journal = self._journal, None
        if closing is not None:
            with suppress(OSError):
                closing.close()

    def _write_report(self) -> None:
        path = self.folder / REPORT
        try:
            path.write_text(page.render([journal.read(self.folder)]), encoding="utf-8")
        except Exception as error:
            _warn(f"no report was written: {_told(error)}")
            return
        self.report = path
        if self._say is not None:
            self._say(f"report: {os.fsencode(path).decode(errors='replace')}")

    def _stop(self, error: Exception) -> None:
        """Ends the recording, and not the run."""
        if self._journal is not None:
            self._close()
            _warn(f"the recording of this run ends: {_told(error)}")
        if self._tracing is not None:
            trace.drop(self._tracing.recording)
            self._tracing = None

    # -- after each step ------------------------------------------------------------------------------------------

    def _after_step(self, *_: object) -> None:
        """The hook of ``step()``."""
        now, runtime = time.perf_counter(), self._runtime
        self._made += 1
        micro_batches, self._backwards = runtime.reducer.backwards - self._backwards, runtime.reducer.backwards
        self._sees_forwards = runtime.schedule.forwards != self._forwards
        self._forwards = runtime.schedule.forwards
        if self._journal is not None:
            try:
                self._note(self._optimizer.steps, now, max(1, micro_batches))
            except Exception as error:
                self._stop(error)
        self._last = time.perf_counter() if self._made == 1 else now

    def _note(self, step: int, now: float, micro_batches: int) -> None:
        """Notes a step that was made."""
        begins, again = self._made == 1, step <= self._last_step
        if again:  # a checkpoint was loaded
            self._go_back(step)
        if begins or again:
            self._begin(step, micro_batches)
        self._last_step = step
        self._write_lines()
        seconds = None if begins or again else now - self._last - self._paused
        usual = self._taken(lr=self._optimizer.param_groups[0].get("lr"), tokens=self._tokens)
        self._lines.append(_Line(step, seconds, usual | self._early))
        self._early, self._paused = {}, 0.0
        self._look(step, micro_batches)
        self._disturbed = False

    def _go_back(self, step: int) -> None:
        """Prepares to make steps again from ``step`` on: those that were made count no more."""
        if self._tracing is not None:
            trace.drop(self._tracing.recording)
            self._tracing, self._wants_trace = None, True
        self._lines = deque(line for line in self._lines if line.step < step)
        self._write_lines(wait=True)

    def _begin(self, step: int, micro_batches: int) -> None:
        """Before the first step, or before steps that are made again: what runs, and what the plan says of it."""
        known = {"tokens": self._tokens, "batch": self._batch, "micro_batches": micro_batches}
        self._write("run", **run_facts(self._runtime, self._name, self.folder, step - 1, **known))
        for evaluation in self._before:
            self._write("evaluation", **evaluation)
        self._before.clear()
        if self._runtime.plan_beside is not None:
            try:
                plan = self._runtime.plan_beside(micro_batches)
            except ValueError:  # the plan cannot say it of every setting
                return
            except Exception as error:
                _warn(f"the report will have no plan: {_told(error)}")
                return
            self._write("plan", **plan)

    def _look(self, step: int, micro_batches: int) -> None:
        """Memory and volume at the 2nd, 4th, 8th ... step; some steps are traced."""
        if self._made >= self._next_look and not self._disturbed:
            self._next_look = 2 * self._made
            self._write("memory", step=step, **memory_facts(self._runtime))
            self._write("volume", step=step, **volume_facts(self._runtime, micro_batches))
        began = time.perf_counter()
        if self._tracing is not None:
            self._tracing.recording.mark("step")
            self._tracing.left -= 1
            if not self._tracing.left:
                self._end_trace()
        self._wants_trace |= self._made in TRACED_AFTER
        if self._wants_trace and self._tracing is None and (recording := trace.begin()) is not None:
            self._wants_trace = False
            recording.mark("step")
            self._tracing = _Tracing(recording, step + 1)
        self._paused = time.perf_counter() - began  # beginning and ending a trace waits for the device

    def _end_trace(self) -> None:
        """Writes the steps of a trace that were completed."""
        tracing, self._tracing = self._tracing, None
        if tracing is None:
            return
        if not trace.end(tracing.recording):  # the user began one
            self._wants_trace = True
        elif tracing.left < TRACED_STEPS:
            self._write("trace", **trace_facts(tracing.recording, tracing.first))

    def _write_lines(self, *, wait: bool = False) -> None:
        """Writes the lines of steps whose values have come, in order."""
        if wait and self._lines and self._runtime.fabric.device.type == "cuda":
            torch.cuda.synchronize(self._runtime.fabric.device)
        while self._lines:
            line = self._lines[0]
            values: dict[str, Any] = {"step": line.step, "seconds": line.seconds}
            for name, late in line.values.items():
                values[name] = late()
                if values[name] is None:
                    return
            self._lines.popleft()
            self._write("step", **{name: value for name, value in values.items() if value is not None})

    def _write(self, kind: str, **values: object) -> None:
        """Writes a line. A full disk ends the recording, and not the run."""
        if self._journal is None:
            return
        try:
            self._journal.write(kind, **values)
        except Exception as error:
            self._stop(error)


def _told(error: Exception) -> str:
    """An error in words. The class is left out where the text says enough."""
    return str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
