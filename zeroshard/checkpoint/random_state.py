"""Random number generators of one rank: read, and set again."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def read(device: torch.device) -> dict[str, Any]:
    """The state of every generator that training commonly draws from: torch's, Python's, and numpy's if it is used."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "seed": torch.initial_seed(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = [name, [int(key) for key in keys], *rest]
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Goes on where ``read`` was."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))


def begin_anew(state: dict[str, Any], rank: int) -> None:
    """For a rank that did not exist when the state was saved: other numbers than any other rank's, but always these."""
    seed = (int(state["seed"]) + 0x9E3779B97F4A7C15 * (rank + 1)) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
