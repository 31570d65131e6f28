"""Memory of one rank by kind in this runtime: at the step, as the papers count, and at the peak."""

from __future__ import annotations

from dataclasses import dataclass

from ..offload.host_buffers import HostBytes
from .activations import transformer_activations
from .device_memory import DeviceMemory, Phase
from .module_trace import Model, ModuleTrace, units_of
from .rank_memory import RankMemory
from .shape import Setup

WORKSPACE = 64 << 20
"""Workspace of the matrix library on a GPU. Forward and backward run on two threads, and each has a workspace."""


@dataclass(frozen=True)
class Budget:
    """The memory that one rank needs."""

    at_step: DeviceMemory
    """The moment between backward and update."""
    at_rest: DeviceMemory
    """The moment between two steps, with the units that are gathered early for the next forward."""
    peak: DeviceMemory
    phase: Phase
    """The phase that has the peak."""
    host: HostBytes
    """Host memory: states, the accumulators of several micro-batches, and checkpoints."""
    host_checkpoints: int = 0
    """The part of ``host`` that is for checkpoints."""


def budget(model: Model, setup: Setup, workspace: int = WORKSPACE) -> Budget:
    """The memory that one rank of a setup needs. ``workspace``: bytes that the device's libraries take.

    >>> from .shape import Transformer
    >>> gpt = Transformer(layers=48, hidden=1600, heads=25, vocabulary=50257, positions=1024)
    >>> needs = budget(gpt, Setup(stage=2, world=64, batch=8))
    >>> round(needs.at_step.model_states / gpt.parameters, 2), needs.phase.value
    (2.22, 'loss')
    """
    activations = model.activations if isinstance(model, ModuleTrace) else transformer_activations(model, setup)
    buffers = model.buffers if isinstance(model, ModuleTrace) else 0
    rank = RankMemory(setup, units_of(model, setup), activations, buffers, workspace)
    phase, more = max(rank.moments(), key=lambda moment: sum(moment[1].values()))
    return Budget(rank.at_step, rank.between_steps, rank.rest.with_more(more), phase, rank.host, activations.host)
