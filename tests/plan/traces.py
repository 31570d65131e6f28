"""Traces of modules, for tests of the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zeroshard.config.options import Activations
from zeroshard.plan.model import blocks, model
from zeroshard.plan.model.factory import arguments_for
from zeroshard.plan.model.known_values import KnownValues
from zeroshard.plan.model.recording import trace_of
from zeroshard.plan.model.trace import Trace
from zeroshard.plan.model.tracer import Built, record
from zeroshard.plan.setup import Setup


def trace(
    build: Callable[[], nn.Module],
    inputs: Any = None,
    precision: str = "bf16",
    *,
    batch: int = 1,
    sequence: int = 1,
    activations: Activations | None = None,
) -> Trace:
    """Builds a module on the meta device and traces it. Without inputs it gets token ids of this batch and sequence."""
    setup = Setup(stage=0, batch=batch, sequence=sequence, precision=precision)  # type: ignore[arg-type]

    def built() -> Built:
        values = KnownValues()
        with torch.device("meta"):
            module = build()
        with values:
            arguments, named = arguments_for(module, inputs, setup)
        return Built(module, tuple(arguments), named, values)

    seen, outline = record(built, precision, 1 << 30, activations=activations)
    on_host = activations is not None and activations.offload
    return trace_of(seen, outline, setup.width, on_host=on_host)


def trace_every_block(patch: pytest.MonkeyPatch) -> None:
    """From now on every block is traced by itself."""
    patch.setattr(blocks, "FEW", 1 << 20)


def trace_every_batch(patch: pytest.MonkeyPatch) -> None:
    """From now on no recording follows from two others."""
    patch.setattr(model, "LARGEST_RECORDED", 1 << 20)
