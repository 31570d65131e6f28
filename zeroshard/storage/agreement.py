"""Ranks that share a checkpoint go on together, or none does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..comm.fabric import Fabric
from .format import CheckpointError

TURN_SECONDS = 0.5


def agree(fabric: Fabric, problem: BaseException | None, told: Any = None) -> list[Any]:
    """Raises on all ranks what went wrong on any: one that left alone would keep the others waiting.

    Returns what every rank told, where nothing did.
    """
    everybody = fabric.gather_objects((None if problem is None else f"{type(problem).__name__}: {problem}", told))
    if problem is not None:
        raise problem
    for rank, (text, _) in enumerate(everybody):
        if text is not None:
            raise CheckpointError(f"rank {rank} failed: {text}")
    return [one for _, one in everybody]


def on_rank_zero(fabric: Fabric, work: Callable[[], object]) -> None:
    """Has rank 0 do something that may take longer than ranks wait for each other. Raises on all what went wrong."""
    done, problem = threading.Event(), []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            problem.append(error)
        finally:
            done.set()

    if fabric.rank == 0:
        threading.Thread(target=run, name="zeroshard rank 0", daemon=True).start()
    else:
        done.set()
    while fabric.maximum([not done.wait(TURN_SECONDS)])[0]:  # every turn finds out whether all ranks are still alive
        pass
    agree(fabric, problem[0] if problem else None)
