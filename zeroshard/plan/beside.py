"""The plan of a run that goes on, beside other stages and without its offload: what its report compares it with."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from ..config.offload import Offload
from .advice import Row, Variant
from .foresee import Foresight, name_of


def beside(foresight: Foresight, stage: int, offload: Offload | None, micro_batches: int) -> dict[str, Any]:
    """The rows of a run, as JSON has them; the run's own row is the one with ``own``."""
    there = copy.copy(foresight)
    there.expect(micro_batches)
    rows = [there.row(number, Variant(name_of(way), way)) for number, way in _settings(stage, offload)]
    return {
        "rows": [_row(row, own=row.setup.stage == stage and row.setup.offload == offload) for row in rows],
        "counts_activations": there.counts_activations,
        "micro_batches": micro_batches,
    }


def _settings(stage: int, offload: Offload | None) -> Iterator[tuple[int, Offload | None]]:
    """The run's setting, the same offload in the other stages, and the run's stage without offload."""
    for number in range(4):
        if offload is None or number == 3 or offload.parameters == "device":
            yield number, offload
        else:  # parameters rest on the host in stage 3 alone
            yield number, replace(offload, parameters="device")
    if offload is not None:
        yield stage, None


def _row(row: Row, *, own: bool) -> dict[str, Any]:
    return {
        "stage": row.setup.stage,
        "offload": row.variant.name,
        "own": own,
        "fits": row.fits,
        "room": row.room,
        "at_step": asdict(row.budget.at_step),
        "peak": asdict(row.budget.peak),
        "host": row.budget.host.total,
        "volume": row.volume.elements,
        "seconds": None if row.time is None else row.time.total,
    }
