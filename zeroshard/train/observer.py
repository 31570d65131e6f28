"""A closer look at a few late steps of a run: what a step moves between host and device, and a trace of what overlaps.

With offload a step returns before the host is done, so memory and traffic are read off one step that is waited for.
It is a late one, so that a delayed update has begun. The steps that are traced come right before it.
"""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import nn

import zeroshard

from ..config.job import TrainConfig
from ..config.table import state_table
from ..observe.ledger import Stats
from ..offload.pipeline import Pipeline
from ..runtime import runtime_of
from ..system.trace import COPIES, Trace
from .paper import OnHost, shared_by
from .summary import Offloaded, StateBytes

TRACED_STEPS = 3
LEAST_STEPS_TO_TRACE = 4  # one that pays for set-up, one to trace, one to measure, and an evaluation between any two


def measured_step(train: TrainConfig) -> int:
    """Return the last step that follows another one directly, so that what it counts is its own; or else the last.

    >>> measured_step(TrainConfig(steps=160)), measured_step(TrainConfig(steps=161))
    (160, 160)
    """
    own = (step for step in range(train.steps, 1, -1) if not _follows_evaluation(step, train))
    return next(own, train.steps)


def traced_steps(train: TrainConfig) -> range:
    """Return the steps before the measured one that a trace shows: no evaluation between them, and not the first.

    >>> traced_steps(TrainConfig(steps=160))
    range(157, 160)
    """
    stop = measured_step(train)
    start = stop - 1
    while start > 2 and stop - start < TRACED_STEPS and not _follows_evaluation(start, train):
        start -= 1
    return range(start, stop)


def _follows_evaluation(step: int, train: TrainConfig) -> bool:
    return (step - 1) % train.evaluate_every == 0


class Observer:
    """Told where each step stands. Use as a context manager."""

    def __init__(self, model: nn.Module, train: TrainConfig, trace_file: Path | None) -> None:
        self._model = model
        self._train = train
        self._pipeline: Pipeline | None = runtime_of(model).pipeline
        self._measured = measured_step(train)
        self._traced = range(0) if trace_file is None else traced_steps(train)
        self._trace_file = trace_file
        self._trace: Trace | None = None
        self._tracing = ExitStack()
        self.offloaded: Offloaded | None = None
        """What the measured step measured; None before it, or where nothing is offloaded."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tracing.close()

    def begin(self, step: int) -> None:
        """Before forward."""
        if self._traced and step == self._traced.start:
            self._settle()
            self._trace = self._tracing.enter_context(zeroshard.trace(self._trace_file))

    def before_update(self, step: int) -> None:
        """Between backward and step: with gradients still on their way, memory would be a matter of luck."""
        if step == self._measured:
            self._settle()

    def end(self, step: int) -> None:
        """After the step."""
        if self._traced and step == self._traced[-1]:
            self._settle()
            self._tracing.close()
        if self._pipeline is not None and step == self._measured:
            self._settle()
            self.offloaded = self._measure(self._pipeline, zeroshard.stats(self._model))

    def told(self) -> str | None:
        """Return a line on the trace; None if there is none."""
        if self._trace is None:
            return None
        if not self._trace.busy(*COPIES):
            verdict = "nothing is offloaded, so nothing was copied"
        else:
            verdict = (
                f"copies hidden by neither device nor host work took {self._trace.exposed_copies():.1%} of the time"
            )
        first, last = self._traced[0], self._traced[-1]
        steps = f"steps {first} to {last}" if first < last else f"step {first}"
        return f"traced {steps} in {self._trace_file}: {verdict}"

    def _settle(self) -> None:
        """Wait until the host has nothing to do. Unlike `zeroshard.synchronize`, it leaves a delayed update delayed."""
        if self._pipeline is not None:
            self._pipeline.wait()

    def _measure(self, pipeline: Pipeline, stats: Stats) -> Offloaded:
        runtime = runtime_of(self._model)
        ranks = shared_by(state_table(stats.stage, runtime.fabric.shards).optimizer.extent, runtime.fabric.shards)
        sizes = [ranks * buffers.numel for buffers in pipeline.buffers]
        assert stats.memory_at_step is not None, "a step has been made"
        assert stats.host_memory is not None, "there is a pipeline"
        return Offloaded(
            on_host=OnHost(
                options=pipeline.options,
                share=sum(sizes) / stats.padded_parameters,
                largest_unit=max(sizes) / stats.padded_parameters,
            ),
            device=StateBytes.of(stats.memory_at_step),
            host=StateBytes.of(stats.host_memory),
            traffic=None if _follows_evaluation(self._measured, self._train) else sum(stats.host_traffic.values()),
        )
