"""What PEFT saves of a model with adapters, so that a save need not gather the frozen base."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..api import full_state_dict, gathered
from ..runtime import runtime_of


@contextmanager
def saved_state(model: nn.Module, rank: int | None) -> Iterator[dict[str, Tensor]]:
    """The state dict that ``save_pretrained(state_dict=...)`` needs: of a model with adapters, these alone.

    ``save_pretrained`` computes a prompt from the model itself, so that inside this block the prompt's parameters are
    whole. With ``rank``, all other ranks get an empty dict. Collective: enter the block on all ranks.
    """
    with gathered(getattr(model, "prompt_encoder", None) or ()):
        names = runtime_of(model).fabric.from_rank_zero(_chosen_by_peft(model))
        yield full_state_dict(model, rank, only=None if names is None else names.__contains__)


def _chosen_by_peft(model: Any) -> frozenset[str] | None:
    """The names of the tensors that PEFT writes. None: it may need all.

    PEFT itself chooses, from a state dict of tensors without values. What it computes from these needs their values.
    """
    settings = getattr(model, "peft_config", None)
    if not isinstance(settings, dict):
        return None
    from peft import get_peft_model_state_dict

    blanks = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta")
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }
    names = {id(blank): name for name, blank in blanks.items()}
    found: set[str] = set()
    for adapter in settings:
        with warnings.catch_warnings(action="ignore"):  # the save itself warns
            chosen = get_peft_model_state_dict(model, state_dict=dict(blanks), adapter_name=adapter).values()
        if any(value.is_meta and id(value) not in names for value in chosen):
            return None
        found.update(names[id(value)] for value in chosen if value.is_meta)
    return frozenset(found)
