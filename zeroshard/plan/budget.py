"""Memory of one rank by kind, as this runtime has it: at the step, as the papers count, and at its peak."""

from __future__ import annotations

from dataclasses import dataclass

from ..offload.host_buffers import HostBytes
from .activations import transformer_activations
from .device_memory import DeviceMemory, Phase
from .module_trace import Model, ModuleTrace, units_of
from .rank_memory import RankMemory
from .shape import Setup

WORKSPACE = 64 << 20
"""Of the library that multiplies matrices on a GPU: forward and backward run on threads that have one each."""


@dataclass(frozen=True)
class Budget:
    """What one rank needs."""

    at_step: DeviceMemory
    """Between backward and update."""
    at_rest: DeviceMemory
    """Between two steps, with what the next forward begins with."""
    peak: DeviceMemory
    phase: Phase
    """When the peak is."""
    host: HostBytes
    """States in host memory, what several micro-batches add up in, and checkpoints."""
    host_checkpoints: int = 0
    """Of that, what checkpoints wait in."""


def budget(model: Model, setup: Setup, workspace: int = WORKSPACE) -> Budget:
    """What one rank of a setup needs; ``workspace`` is what the device's libraries take.

    >>> from .shape import Transformer
    >>> gpt = Transformer(layers=48, hidden=1600, heads=25, vocabulary=50257, positions=1024)
    >>> needs = budget(gpt, Setup(stage=2, world=64, batch=8))
    >>> round(needs.at_step.model_states / gpt.parameters, 2), needs.phase.value
    (2.22, 'loss')
    """
    activations = model.activations if isinstance(model, ModuleTrace) else transformer_activations(model, setup)
    buffers = model.buffers if isinstance(model, ModuleTrace) else 0
    rank = RankMemory(setup, units_of(model, setup), activations, buffers, workspace)
    phase, beside = max(rank.moments(), key=lambda moment: sum(moment[1].values()))
    return Budget(rank.at_step, rank.between_steps, rank.rest.with_more(beside), phase, rank.host, activations.host)
