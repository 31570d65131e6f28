"""A closer look at a few late steps of a run: traffic between host and device, and a trace.

With offload, `optimizer.step()` returns before the host is done. Memory and traffic are therefore read at one step
that waits for the host. This step is late in the run, so that a delayed update has begun. A trace records the steps
right before it.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Self

from torch import nn

import zeroshard

from ..config.job import TrainConfig
from ..offload.pipeline import Pipeline
from ..plan.papers.formulas import HostPart, ranks_that_update
from ..runtime import runtime_of
from ..system.trace import COPIES, Trace
from .record import OffloadStep, Record, StepTrace

TRACED_STEPS = 3
LEAST_STEPS_TO_TRACE = 4  # a first step with the set-up, one to trace, one to measure, and an evaluation between two


def measured_step(train: TrainConfig) -> int:
    """Return the last step that no evaluation precedes directly, so that its counts are its own; else the last step.

    >>> measured_step(TrainConfig(steps=160)), measured_step(TrainConfig(steps=161))
    (160, 160)
    """
    own = (step for step in range(train.steps, 1, -1) if not _follows_evaluation(step, train))
    return next(own, train.steps)


def traced_steps(train: TrainConfig) -> range:
    """Return the steps that a trace shows: right before the measured step, without an evaluation, without step 1.

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


class Probe:
    """Adds the offload step and the trace to a record. Use as a context manager."""

    def __init__(self, model: nn.Module, train: TrainConfig, record: Record, trace_file: Path | None = None) -> None:
        self._model, self._train, self._record, self._trace_file = model, train, record, trace_file
        self._pipeline: Pipeline | None = runtime_of(model).pipeline
        self._measured = measured_step(train)
        self._traced = range(0) if trace_file is None else traced_steps(train)
        self._trace: Trace | None = None
        self._tracing = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._tracing.close()

    def begin(self, step: int) -> None:
        """Call before forward."""
        if self._traced and step == self._traced[0]:
            self._settle()
            self._trace = self._tracing.enter_context(zeroshard.trace(self._trace_file))

    def before_update(self, step: int) -> None:
        """Call between backward and step. Waits for gradients on their way: otherwise memory would vary by chance."""
        if step == self._measured:
            self._settle()

    def end(self, step: int) -> None:
        """Call after the step."""
        if self._trace is not None and self._trace_file is not None and step == self._traced[-1]:
            self._settle()
            self._tracing.close()
            exposed = self._trace.exposed_copies() if self._trace.busy(*COPIES) else None
            self._record.trace = StepTrace(self._traced, self._trace_file, exposed)
        if self._pipeline is not None and step == self._measured:
            self._settle()
            self._record.offload = self._offload_step(self._pipeline)

    def _settle(self) -> None:
        """Wait until the host has nothing to do. Unlike `zeroshard.synchronize`, it leaves a delayed update delayed."""
        if self._pipeline is not None:
            self._pipeline.wait()

    def _offload_step(self, pipeline: Pipeline) -> OffloadStep:
        stats = zeroshard.stats(self._model)
        ranks = ranks_that_update(stats.stage, runtime_of(self._model).fabric.shards)
        sizes = [ranks * buffers.numel for buffers in pipeline.buffers]
        part = HostPart(
            options=pipeline.options,
            share=sum(sizes) / stats.padded_parameters,
            largest_unit=max(sizes) / stats.padded_parameters,
        )
        assert stats.memory_at_step is not None, "a step has been made"
        assert stats.host_memory is not None, "there is a pipeline"
        mixed = _follows_evaluation(self._measured, self._train)
        traffic = None if mixed else sum(stats.host_traffic.values())
        return OffloadStep(part, stats.memory_at_step, stats.host_memory, traffic)
