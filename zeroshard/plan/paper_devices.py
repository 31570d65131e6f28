"""What a device of the papers' time holds, and so which models and batches fit on it (ZeRO, sections 3, 5 and 6).

Not this runtime's memory, which ``budget.py`` knows: theirs, with its fused buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from .machine_profile import Machine
from .model_states import ModelStateBytes
from .shape import Setup, Transformer

GB, BILLION = 1e9, 1e9
SEQUENCE = 1024
RESERVED = 3.2 * GB
"""Of a device, whatever the model: CUDA's and NCCL's own, about 1.2 GB, and the two fused buffers of 5e8 16-bit
elements that the papers' runtime had by default (C_B)."""
WORKING = 12
"""Elements of activations a token and hidden unit that one block holds while it is recomputed (ZeRO, section 3)."""
WHOLE_BUFFERS = 4
"""Bytes a parameter of fused fp32 buffers that are as large as the model, where nothing bounds them (ZeRO, 6.2)."""
LEAST_BATCH = 4
"""Of a replica, for the largest models: what ZeRO-Offload's 13B ran with; ZeRO's with MP 16 ran with 16."""


@dataclass(frozen=True)
class Residual:
    """What of ZeRO-R a run uses."""

    partitioned: bool = True
    """P_a: checkpoints are divided among model-parallel ranks."""
    bounded: bool = True
    """C_B: fused buffers have a constant size."""
    on_host: bool = False
    """P_a+cpu: checkpoints leave the device."""


ZERO_R, BASELINE = Residual(), Residual(partitioned=False, bounded=False)


def device_bytes(model: Transformer, setup: Setup, residual: Residual = ZERO_R) -> float:
    """What one device of the papers' time needs: states, checkpoints, one block's activations, logits, buffers."""
    parameters = model.parameters // setup.model_parallel
    states = ModelStateBytes(2 * parameters, 2 * parameters, 12 * parameters).on_device(setup.offload)
    tokens = setup.batch * setup.sequence
    checkpoints = 2 * tokens * model.hidden * model.layers
    return (
        states.per_rank(setup.stage, setup.world)
        + (0 if residual.bounded else WHOLE_BUFFERS * parameters)
        + (0 if residual.on_host else checkpoints / (setup.model_parallel if residual.partitioned else 1))
        + 2 * WORKING * tokens * model.hidden
        + (2 + 4) * tokens * model.vocabulary / setup.model_parallel
        + RESERVED
    )


def fits(model: Transformer, setup: Setup, machine: Machine, residual: Residual = ZERO_R) -> bool:
    """On the device, and what is offloaded on the host."""
    on_host = 0.0 if setup.offload is None else 16.0 * model.parameters * _nodes_share(setup, machine)
    return device_bytes(model, setup, residual) <= machine.device.memory and on_host <= machine.host.memory


def _nodes_share(setup: Setup, machine: Machine) -> float:
    return min(1.0, machine.devices_per_node / setup.devices)


def largest_batch(model: Transformer, setup: Setup, machine: Machine, residual: Residual = ZERO_R) -> int:
    """Sequences of a micro-batch; 0 where not even one fits."""
    batch = 0
    while fits(model, replace(setup, batch=batch + 1), machine, residual):
        batch += 1
    return batch


def largest_model(hidden: int, setup: Setup, machine: Machine, residual: Residual = ZERO_R) -> float:
    """Parameters, in billions, of as many blocks as fit."""
    setup = replace(setup, batch=max(LEAST_BATCH, setup.model_parallel))
    low, high = 0, 1
    while fits(gpt(high, hidden), setup, machine, residual):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(gpt(middle, hidden), setup, machine, residual) else (low, middle)
    return gpt(low, hidden).parameters / BILLION if low else 0.0


@cache
def gpt(layers: int, hidden: int) -> Transformer:
    """The papers' models: GPT-2 in other sizes."""
    return Transformer(layers=layers, hidden=hidden, heads=max(1, hidden // 128), vocabulary=50257, positions=SEQUENCE)
