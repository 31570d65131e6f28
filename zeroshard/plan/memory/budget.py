"""Memory of one rank by kind in this runtime: at the step, as the papers count, and at the peak."""

from __future__ import annotations

from dataclasses import dataclass

from ...offload.host_buffers import HostBytes
from ..model.model import Model
from ..model.trace import Trace
from ..setup import Setup
from .device_memory import DeviceMemory, Phase
from .rank_memory import RankMemory

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


def budget(model: Model | Trace, setup: Setup, workspace: int = WORKSPACE) -> Budget:
    """The memory that one rank of a setup needs. ``workspace``: bytes that the device's libraries take.

    >>> from ...config.job import ModelConfig
    >>> from ..model.gpt import from_config
    >>> gpt = from_config(ModelConfig(layers=48, hidden=1600, heads=25, sequence=1024, vocabulary=50257))
    >>> needs = budget(gpt, Setup(stage=2, world=64, batch=8))
    >>> round(needs.at_step.model_states / gpt.parameters, 2), needs.phase.value
    (2.22, 'loss')
    """
    traced = model if isinstance(model, Trace) else model.trace(setup)
    rank = RankMemory(setup, traced, workspace)
    phase, more = max(rank.moments(), key=lambda moment: sum(moment[1].values()))
    host = traced.activations.host
    return Budget(rank.at_step, rank.between_steps, rank.rest.with_more(more), phase, rank.host, host)
