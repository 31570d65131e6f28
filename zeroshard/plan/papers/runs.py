"""The runs of the papers: which models and batches fit, and how fast they are.

Memory is that of the papers' runtime, with its fused buffers (ZeRO, sections 3, 5 and 6). The memory of this runtime
is in ``plan/memory``. Speed is that of this runtime's schedule, which overlaps more than the papers' schedule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...config.offload import Offload
from ..machine.profile import Machine
from ..setup import Setup
from ..time.step_time import step_time
from ..time.unit_costs import host_update_bytes
from .formulas import HostPart, paper_memory, total_bytes
from .shape import Transformer, gpt

GB, BILLION = 1e9, 1e9
LEAST_BATCH = 4
"""The batch of a replica of the largest models: ZeRO-Offload's 13B ran with 4; ZeRO's models with MP 16 ran with 16."""
RESERVED = 3.2 * GB
"""Bytes of a device that any model needs: about 1.2 GB for CUDA and NCCL, and the two fused buffers of 5e8 16-bit
elements that the papers' runtime had by default (C_B)."""
WHOLE_BUFFERS = 4
"""Bytes a parameter of fused fp32 buffers that are as large as the model, if their size is not constant (ZeRO, 6.2)."""


@dataclass(frozen=True, kw_only=True)
class Run(Setup):
    """A run of the papers: a setup with its machine and its GPT. A number needs only some of the fields."""

    machine: Machine
    stage: int = 0
    layers: int = 0
    hidden: int = 0
    size: float = 1.0
    """Billions of parameters, for numbers that follow from nothing else of the model."""
    divided_checkpoints: bool = True
    """P_a: model-parallel ranks divide checkpoints."""
    host_checkpoints: bool = False
    """P_a+cpu: checkpoints are on the host."""
    constant_buffers: bool = True
    """C_B: the size of fused buffers does not depend on the model."""

    @property
    def model(self) -> Transformer:
        return gpt(self.layers, self.hidden)

    @property
    def states(self) -> float:
        """Gigabytes of model states of one rank, with Adam in mixed precision."""
        part = None if self.offload is None else HostPart(options=self.offload)
        return total_bytes(paper_memory(self.stage, self.world, "fp16", part).device, self.size)

    @property
    def memory(self) -> float:
        """Gigabytes of one device: states, checkpoints, activations of one block, logits, buffers."""
        model, parameters = self.model, self.model.parameters // self.model_parallel
        checkpoints = model.paper_activations(self, divided=self.divided_checkpoints)
        block = gpt(1, self.hidden).paper_activations(replace(self, checkpointing=False))
        logits = (2 + 4) * self.batch * self.sequence * model.vocabulary / self.model_parallel
        buffers = RESERVED + (0 if self.constant_buffers else WHOLE_BUFFERS * parameters)
        others = (0 if self.host_checkpoints else checkpoints) + block + logits + buffers
        return replace(self, size=parameters / BILLION).states + others / GB

    @property
    def fits(self) -> bool:
        """True if the model fits on the device, and its offloaded states fit on the host."""
        nodes = max(1, self.devices / self.machine.devices_per_node)
        on_host = 0 if self.offload is None else 16 * self.model.parameters / nodes
        return self.memory * GB <= self.machine.device.memory and on_host <= self.machine.host.memory

    def largest_batch(self) -> int:
        """The largest batch that fits, but at least 1."""
        return max(1, _largest(lambda batch: replace(self, batch=batch).fits))

    def largest_model(self) -> float:
        """Billions of parameters of the largest model that fits with this hidden size."""
        run = replace(self, batch=max(LEAST_BATCH, self.model_parallel))
        layers = _largest(lambda count: replace(run, layers=count).fits)
        return gpt(layers, self.hidden).parameters / BILLION

    def least_model_parallelism(self) -> int:
        """The smallest degree of model parallelism, a power of 2, with which the model fits on these devices."""
        degrees = (1 << power for power in range(9))
        runs = (replace(self, world=self.devices // degree, model_parallel=degree) for degree in degrees)
        return next(run.model_parallel for run in runs if run.fits)

    def speed(self) -> float:
        """TFLOPS of one device."""
        return step_time(self.model.work(self), self, self.machine).tflops_per_device

    def host_update(self) -> float:
        """Seconds of an update by one process on the host."""
        return self.size * BILLION * host_update_bytes(Offload(), 2) / self.machine.host_bandwidth(1)


GROUPS: dict[str, Callable[[Run], float]] = {
    "model states": lambda run: run.states,
    "largest states": lambda run: run.model_parallel * 32 / run.states,  # billions of parameters on 32 GB
    "cached memory": lambda run: run.memory,
    "largest model": Run.largest_model,
    "trained model": lambda run: run.fits * run.model.parameters / BILLION,
    "least model parallelism": Run.least_model_parallelism,
    "speed": Run.speed,
    "speed of all": lambda run: run.devices * run.speed() / 1000,  # PFLOPS
    "host update": Run.host_update,
}
"""How our number of a claim is computed."""


def _largest(fits: Callable[[int], bool], most: int = 1 << 20) -> int:
    """The largest number up to ``most`` that fits, if all smaller numbers fit too; 0 if none fits.

    >>> _largest(lambda number: number < 78)
    77
    """
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))
