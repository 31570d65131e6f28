"""Turns a module and the options of ``shard()`` into what the plan needs."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from ...comm.parallel import local, mesh_of
from ...config.checks import DTYPES
from ...config.layout import ROOT, ROOT_TITLE
from ...config.options import AUTO, EMPTY, Activations, Config
from ...offload.rules import check_has_kernel
from ..memory.model_states import state_tensors
from ..setup import FirstValues, Setup
from .factory import arguments_for
from .known_values import KnownValues
from .model import error_text
from .recording import Outline, Recording, Traces
from .trace import ActivationBytes, Trace
from .tracer import Built, record, tokens_of
from .units import buffer_bytes, module_units


def setup_of(model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, shards: int) -> Setup:
    """The setup of a module, with stage 0 and no offload."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        dtype = config.precision.parameters or parameter.dtype
        sizes[dtype] = sizes.get(dtype, 0) + parameter.numel()
    # precision=None allows several dtypes. The one with most parameters counts.
    dtype = max(sizes, key=lambda kind: sizes[kind])
    names = {known: name for name, known in DTYPES.items()} | {torch.float64: "fp64"}
    return Setup(
        stage=0,
        world=shards,
        precision=cast(Any, names.get(dtype, "bf16")),
        masters=config.precision.keeps_master,
        checkpointing=_checkpoints(model) or (config.activations is not None and bool(config.activations.recompute)),
        moments=2 if optimizer is None else math.ceil(state_tensors(optimizer)),
        **gathering(config),
    )


def first_values(model: nn.Module, config: Config, device_type: str) -> FirstValues:
    """How the parameters have or get their first values on a device of this type."""
    present = sum(local(parameter).nbytes for parameter in model.parameters() if parameter.device.type == device_type)
    parameter = next(model.parameters())
    initialised = parameter.is_meta and config.weights is None and config.init != EMPTY
    return FirstValues(present, parameter.itemsize if initialised else 0)


def gathering(config: Config) -> dict[str, Any]:
    """The fields of a setup that options about gathered units decide."""
    roots, keep = {ROOT, ROOT_TITLE}, config.keep
    return {
        "cast_on_gather": config.precision.cast_on_gather,
        "prefetch": config.units_ahead,
        "keep": 1 if keep is None else len(set(keep) - roots),
        "keep_root": keep is None or not roots.isdisjoint(keep),
        "max_unit_bytes": config.max_unit_bytes,
    }


@dataclass(frozen=True)
class Examined:
    """The traces of a module with ``Activations(recompute="auto")``."""

    traces: Traces
    _known: dict[Activations | None, Trace] = field(default_factory=dict)

    def trace(self, setup: Setup) -> Trace:
        """The trace for a setup, which without ``activations`` recomputes no block."""
        options, blocks = setup.activations, self.traces.blocks
        if options not in self._known:
            chosen = [False] * len(blocks) if options is None else options.recomputed(blocks)
            self._known[options] = self.traces.trace(chosen)
        return self._known[options]

    @property
    def parameters(self) -> int:
        return self.traces.trace().parameters


def examine(model: nn.Module, config: Config, setup: Setup) -> tuple[Trace | Examined, str | None]:
    """The module as a trace, and the reason if activations are not known."""
    width = None if config.precision.parameters is None else setup.width
    units = module_units(model, width, config.max_unit_bytes, config.units)
    plain = Trace(units, buffer_bytes(model), ActivationBytes.none(len(units)))
    if config.example is None:
        return plain, "which depend on the batch (pass example=, one micro-batch, to count them too)"
    if mesh_of(model) is not None:
        return plain, "which are not traced for a model with tensor parallelism"
    activations = config.activations
    if activations is not None and not activations.recompute:
        return plain, "which are not traced with activations= and activations.recompute=0"
    if setup.precision not in DTYPES:
        return plain, f"which are not traced in {setup.precision}"

    def build() -> Built:
        twin, values = _on_meta(model), KnownValues()
        with values:
            arguments, named = arguments_for(twin, config.example, setup)
        return Built(twin, tuple(arguments), named, values, tokens_known=tokens_of(config.example) != (0, 0))

    every = None if activations is None else replace(activations, recompute=1.0)

    def recording(*, keeping: bool = False) -> tuple[Recording, Outline]:
        limit, chosen = config.max_unit_bytes, config.units
        return record(build, setup.precision, limit, chosen=chosen, activations=every, keeping=keeping)

    try:
        with torch.random.fork_rng(devices=[]):  # a trace leaves the random state as it was
            offloads = activations is not None and activations.offload
            traces = Traces(recording(), lambda: recording(keeping=True), setup.width, on_host=offloads)
            if activations is None:
                return traces.trace(), None
            if activations.recompute != AUTO:
                return traces.trace(activations.recomputed(traces.blocks)), None
            examined = Examined(traces)
            examined.trace(replace(setup, activations=None))  # both recordings, while their errors are caught
            return examined, None
    except Exception as error:
        return plain, f"for tracing {type(model).__name__} with example= failed ({error_text(error)})"


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy of the model on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def _checkpoints(model: nn.Module) -> bool:
    """True if the model says that its blocks are recomputed in backward."""
    said = getattr(getattr(model, "config", None), "checkpointing", False)
    return bool(said or getattr(model, "is_gradient_checkpointing", False))


def has_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """True if the host has a kernel for this optimizer."""
    try:
        check_has_kernel(optimizer)
    except ValueError:
        return False
    return True
