"""A model that can be planned: how it is built on the meta device, and what a trace of it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...config.options import Activations
from ...system.words import line
from ..setup import ModelError, Setup
from .recording import Outline, Recording, Traces, at_batch
from .trace import Trace
from .tracer import Built, record

LARGEST_RECORDED = 3
"""The largest batch that is traced by itself. In a batch of one, tensors may be contiguous that are not in others."""

DECISIVE = ("precision", "batch", "sequence", "checkpointing", "activations", "model_parallel", "max_unit_bytes")
"""The fields of a setup that a trace depends on."""


@dataclass(frozen=True, eq=False)
class Model:
    """A model and its traces. A trace is made once for each batch, sequence, precision and way to recompute."""

    name: str
    build: Callable[[Setup], Built]
    """Builds what one model-parallel rank has, with inputs for the batch and sequence of a setup."""
    recomputes_itself: bool = False
    """True if the module has its own way to recompute blocks, which the setup's ``checkpointing`` turns on. Other
    modules are recomputed by ``shard(activations=...)``."""
    sequence: int = 1024
    """The usual length of a sequence."""
    remedy: str = ""
    """What to do if tracing fails."""
    source: str = ""
    """Where the model comes from, as errors name it; empty: the name."""
    more: int = 0
    """The number of blocks that are not built. They equal the last block but one."""
    _known: dict[object, tuple[Recording, Outline]] = field(default_factory=dict, repr=False)
    _known_traces: dict[object, Traces] = field(default_factory=dict, repr=False)
    _traces: dict[object, Trace] = field(default_factory=dict, repr=False)

    def trace(self, setup: Setup) -> Trace:
        """The trace for a setup.

        Raises:
            ModelError: if the module cannot be built or traced.
        """
        setup = replace(setup, activations=self.recomputation(setup.checkpointing, setup.activations))
        key = tuple(getattr(setup, name) for name in DECISIVE)
        if key not in self._traces:
            options = setup.activations
            traces = self._traces_of(replace(setup, activations=options and replace(options, recompute=1.0)))
            self._traces[key] = traces.trace(None if options is None else options.recomputed(traces.blocks))
        return self._traces[key]

    def _traces_of(self, setup: Setup) -> Traces:
        """The traces for a setup, whichever blocks it recomputes."""
        key = tuple(getattr(setup, name) for name in DECISIVE)
        if key not in self._known_traces:
            options = setup.activations
            self._known_traces[key] = Traces(
                self._recording(setup, keeping=False),
                lambda: self._recording(setup, keeping=True),
                setup.width,
                ranks=setup.model_parallel if options is not None and options.partition else 1,
                on_host=options is not None and options.offload,
            )
        return self._known_traces[key]

    def _recording(self, setup: Setup, *, keeping: bool) -> tuple[Recording, Outline]:
        """The recording for a setup. That of a large batch follows from two small ones."""
        if setup.batch > LARGEST_RECORDED:
            (fewer, built), (more, _) = (
                self._record(replace(setup, batch=batch), keeping) for batch in (LARGEST_RECORDED - 1, LARGEST_RECORDED)
            )
            if fewer.like(more):
                batched = at_batch(fewer, more, setup.batch - LARGEST_RECORDED + 1)
                return batched, built.with_more(self.more)
        seen, built = self._record(setup, keeping)
        return seen, built.with_more(self.more)

    def _record(self, setup: Setup, keeping: bool) -> tuple[Recording, Outline]:
        key = keeping, *(getattr(setup, name) for name in DECISIVE)
        if key not in self._known:
            try:
                self._known[key] = record(
                    lambda: self.build(setup),
                    setup.precision,
                    setup.max_unit_bytes,
                    activations=setup.activations,
                    degree=setup.model_parallel,
                    keeping=keeping,
                )
            except ModelError:
                raise
            except (Exception, SystemExit) as error:
                where, reason = self.source or self.name, f"{error_text(error)}{self.remedy}"
                raise ModelError(f"--model {where}: tracing it on the meta device failed: {reason}") from None
        return self._known[key]

    def recomputation(self, checkpointing: bool, options: Activations | None) -> Activations | None:
        """The option of ``shard()`` that recomputes blocks. None if the module does so itself, or if nobody does."""
        if not checkpointing:
            return None
        return options or (None if self.recomputes_itself else Activations())

    @cached_property
    def parameters(self) -> int:
        """Ψ of the whole model."""
        return self.trace(Setup(stage=0, sequence=self.sequence, checkpointing=False)).parameters


def error_text(error: BaseException) -> str:
    """The kind of an error and its message on one line, cut if that is long."""
    return f"{type(error).__name__}: {line(' '.join(str(error).split()), 300)}".rstrip(": ")
