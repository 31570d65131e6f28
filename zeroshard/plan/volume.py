"""The volume of a step between ranks, and between host and device: exactly what ``stats(model)`` counts.

If a checkpoint does not divide evenly, the number is that of the first model-parallel rank, whose part is the largest.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config.table import Extent, state_table
from .memory.rank_units import place
from .model.model import Model
from .model.trace import Trace
from .setup import Setup


@dataclass(frozen=True)
class Volume:
    """The volume of one rank in a step, after the first step."""

    all_gather: int = 0
    """Elements of whole flats; so are the next two."""
    reduce_scatter: int = 0
    all_reduce: int = 0
    """Counted twice, because an all-reduce is a reduce-scatter and an all-gather."""
    to_host: int = 0
    """Bytes of model states."""
    to_device: int = 0
    """Bytes of model states."""
    checkpoints_gathered: int = 0
    """P_a: elements of whole checkpoints that model-parallel ranks gather."""
    checkpoints_to_host: int = 0
    """P_a+cpu: bytes of checkpoints."""
    checkpoints_to_device: int = 0
    """P_a+cpu: bytes of checkpoints."""

    @property
    def elements(self) -> int:
        """All elements between data-parallel ranks."""
        return self.all_gather + self.reduce_scatter + self.all_reduce


def volume(model: Model | Trace, setup: Setup) -> Volume:
    """The volume of a step. Every micro-batch is reduced.

    >>> from ..config.job import ModelConfig
    >>> from .model.gpt import from_config
    >>> gpt = from_config(ModelConfig(layers=2, hidden=64, heads=1, sequence=1024, vocabulary=256))
    >>> setups = [Setup(stage=stage, world=2, keep=0, keep_root=False) for stage in range(4)]
    >>> [round(volume(gpt, setup).elements / gpt.parameters, 1) for setup in setups]
    [2.0, 2.0, 2.0, 3.0]
    """
    offload, width, times = setup.offload, setup.width, setup.micro_batches
    table = state_table(setup.stage, setup.world, offload)
    traced = model if isinstance(model, Trace) else model.trace(setup)
    units = place(setup, traced.units)
    flats = [flat for unit in units for flat in unit.flats]
    trained = sum(flat.whole for flat in flats if flat.shape.trained)
    kept = {*range(setup.keep_root), *range(max(1, len(units) - setup.keep), len(units))}
    gathers = [times * (1 if number in kept else 2) for number in range(len(units))]

    gathered = reduced = summed = 0
    if table.parameters.extent is Extent.SHARD:
        gathered = sum(unit.whole * count for unit, count in zip(units, gathers, strict=True))
        reduced = times * trained
    elif table.optimizer.extent is Extent.SHARD:
        gathered, reduced = trained, times * trained
    else:
        summed = 2 * times * trained

    down = up = 0
    if offload is not None:
        own = sum(flat.own for flat in flats if flat.on_host)
        down = width * own * (times + offload.read_back)
        if offload.parameters == "cpu":
            up = width * sum(
                flat.shard * count for unit, count in zip(units, gathers, strict=True) for flat in unit.flats
            )
        else:
            up = width * own
    if setup.world == 1:
        gathered = reduced = summed = 0
    return Volume(gathered, reduced, summed, down, up, *_of_checkpoints(traced, setup))


def _of_checkpoints(traced: Trace, setup: Setup) -> tuple[int, int, int]:
    """Elements that are gathered, and bytes to the host and to the device."""
    options, times = setup.activations, setup.micro_batches
    if options is None or not setup.checkpointing:
        return 0, 0, 0
    moved = times * traced.checkpoints if options.offload else 0
    return times * traced.gathered_checkpoints, moved, moved
