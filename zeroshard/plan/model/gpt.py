"""The GPT of ``zeroshard train``, and of made-up sizes, as a model to plan."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from functools import lru_cache

import torch

from ...config.job import ModelConfig
from ..setup import Setup
from .blocks import FEW
from .divide import check_heads, divide
from .model import Model
from .tracer import Built, Uninitialised

MODULE = "zeroshard.train.gpt"
"""Imported when a GPT is built, as the module of a user is: the room ``train`` is above this one."""
PARALLEL = "zeroshard.train.gpt.tensor_parallel"
BUILT = FEW + 1
"""The most layers that are built. All are equal, and a few of them are traced."""


def from_config(config: ModelConfig, name: str = "") -> Model:
    """A GPT. It has as many positions as a sequence of the setup has tokens, as in ``zeroshard train``.

    >>> config = ModelConfig(layers=48, hidden=64, heads=1, sequence=1024, vocabulary=256)
    >>> from_config(config).parameters == config.parameters
    True
    """
    built = min(config.layers, BUILT)
    family = _family(replace(config, layers=built, sequence=1, checkpointing=False))
    return replace(
        family, name=name or "GPT", more=config.layers - built, sequence=config.sequence, _known_traces={}, _traces={}
    )


@lru_cache(maxsize=256)  # models that differ only in their depth have the same blocks
def _family(config: ModelConfig) -> Model:
    """A GPT with few layers."""

    def build(setup: Setup) -> Built:
        check_heads(setup.model_parallel, config.heads)
        recomputes = setup.checkpointing and setup.activations is None
        wanted = replace(config, sequence=setup.sequence, checkpointing=recomputes)
        with torch.device("meta"), Uninitialised():
            model = importlib.import_module(MODULE).GPT(wanted)
            tokens = torch.zeros(setup.batch, setup.sequence, dtype=torch.long)
        divided: frozenset[int] = frozenset()
        if setup.model_parallel > 1:
            parallel = importlib.import_module(PARALLEL)
            divided = divide(model, parallel.styles(tied=config.tied), setup.model_parallel)
            parallel.expect_divided_logits(model)
        part = math.ceil(config.vocabulary / setup.model_parallel)
        return Built(model, (tokens, tokens), divided=divided, logits=tokens.numel() * part, uniform=True)

    return Model("GPT", build, recomputes_itself=True)
