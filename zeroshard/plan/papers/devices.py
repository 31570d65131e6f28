"""Memory of the papers' runtime, with its fused buffers: which models and batches fit (ZeRO, sections 3, 5 and 6).

The memory of this runtime is in ``budget.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from ..machine.profile import Machine
from ..setup import MOST_LAYERS, Setup
from .formulas import HostPart, paper_memory, total_bytes
from .shape import Transformer

GB, BILLION = 1e9, 1e9
LARGEST_BATCH = 1 << 20
SEQUENCE = 1024
RESERVED = 3.2 * GB
"""Bytes of a device that any model needs: about 1.2 GB for CUDA and NCCL, and the two fused buffers of 5e8 16-bit
elements that the papers' runtime had by default (C_B)."""
WORKING = 12
"""Elements of activations of one block while it is recomputed, for each token and hidden unit (ZeRO, section 3)."""
WHOLE_BUFFERS = 4
"""Bytes a parameter of fused fp32 buffers that are as large as the model, if their size is not bounded (ZeRO, 6.2)."""
LEAST_BATCH = 4
"""The batch of a replica of the largest models: ZeRO-Offload's 13B ran with 4; ZeRO's models with MP 16 ran with 16."""


@dataclass(frozen=True)
class Residual:
    """The parts of ZeRO-R that a run uses."""

    partitioned: bool = True
    """P_a: model-parallel ranks divide checkpoints."""
    bounded: bool = True
    """C_B: fused buffers have a constant size."""
    on_host: bool = False
    """P_a+cpu: checkpoints are on the host."""


ZERO_R, BASELINE = Residual(), Residual(partitioned=False, bounded=False)


def device_bytes(model: Transformer, setup: Setup, residual: Residual = ZERO_R) -> float:
    """Bytes on one device in the papers' runtime: states, checkpoints, activations of one block, logits, buffers."""
    parameters = model.parameters // setup.model_parallel
    part = None if setup.offload is None else HostPart(options=setup.offload)
    states = paper_memory(setup.stage, setup.world, "fp16", part).device
    tokens = setup.batch * setup.sequence
    checkpoints = 2 * tokens * model.hidden * model.layers
    return (
        total_bytes(states, parameters)
        + (0 if residual.bounded else WHOLE_BUFFERS * parameters)
        + (0 if residual.on_host else checkpoints / (setup.model_parallel if residual.partitioned else 1))
        + 2 * WORKING * tokens * model.hidden
        + (2 + 4) * tokens * model.vocabulary / setup.model_parallel
        + RESERVED
    )


def fits(model: Transformer, setup: Setup, machine: Machine, residual: Residual = ZERO_R) -> bool:
    """True if a model fits on the device, and its offloaded states fit on the host."""
    on_host = 0.0 if setup.offload is None else 16.0 * model.parameters * _nodes_share(setup, machine)
    return device_bytes(model, setup, residual) <= machine.device.memory and on_host <= machine.host.memory


def _nodes_share(setup: Setup, machine: Machine) -> float:
    return min(1.0, machine.devices_per_node / setup.devices)


def largest_batch(model: Transformer, setup: Setup, machine: Machine, residual: Residual = ZERO_R) -> int:
    """The largest micro-batch that fits, in sequences; 0 if not even one fits."""
    return largest_number(lambda batch: fits(model, replace(setup, batch=batch), machine, residual), LARGEST_BATCH)


def largest_model(hidden: int, setup: Setup, machine: Machine, residual: Residual = ZERO_R) -> float:
    """The largest model that fits with this hidden size, in billions of parameters."""
    setup = replace(setup, batch=max(LEAST_BATCH, setup.model_parallel))
    layers = largest_number(lambda count: fits(gpt(count, hidden), setup, machine, residual), MOST_LAYERS)
    return gpt(layers, hidden).parameters / BILLION if layers else 0.0


@cache
def gpt(layers: int, hidden: int) -> Transformer:
    """A model of the papers: GPT-2 in another size."""
    return Transformer(layers=layers, hidden=hidden, heads=max(1, hidden // 128), vocabulary=50257, positions=SEQUENCE)


def largest_number(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits, if all smaller numbers fit too; 0 if none fits.

    >>> largest_number(lambda number: number < 78, 1000)
    77
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
