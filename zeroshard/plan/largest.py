"""The largest GPT that fits, for every stage and offload: the answer to ``plan --max-model``."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..config.job import ModelConfig
from .advice import Row, Variant, largest_with_room, variants
from .machine.hardware import Hardware
from .model.gpt import from_config
from .model.model import Model
from .setup import MOST_LAYERS, Setup

LARGEST_HIDDEN = 1 << 18
HEAD = 128
"""Width of a head in made-up models. Hidden sizes are multiples of it."""
VOCABULARY = 50257


def made_up(heads: int, layers: int, vocabulary: int, setup: Setup) -> ModelConfig:
    """A made-up GPT with so many heads and layers."""
    hidden = heads * head_width(setup.model_parallel)
    return ModelConfig(layers=layers, hidden=hidden, heads=heads, sequence=setup.sequence, vocabulary=vocabulary)


def head_width(model_parallel: int) -> int:
    """The width of a head in made-up models. If many ranks share the heads, smaller heads give more sizes to choose."""
    return HEAD if model_parallel <= 16 else HEAD // 2


def usual_layers(hidden: int) -> int:
    """The usual depth of a GPT of this width: 48 at 1600 (GPT-2), about 100 at 8192 (ZeRO's 100B), 130 at 25600 (1T).

    >>> [usual_layers(hidden) for hidden in (1600, 8192, 25600)]
    [46, 104, 132]
    """
    return max(2, round(hidden / (24 + hidden / 150)))


def largest_models(
    setup: Setup, hardware: Hardware, vocabulary: int = VOCABULARY
) -> list[tuple[Row, ModelConfig | None]]:
    """For every stage and offload the largest GPT that fits; None if not even the smallest GPT fits."""
    found = []
    hidden = 0
    for stage in range(4):
        for variant in variants(stage, setup, hardware):
            asked = replace(setup, stage=stage, offload=variant.offload)
            config = largest_model(asked, hardware, vocabulary, near=hidden)
            hidden = config.hidden if config is not None else hidden
            shown = config or made_up(setup.model_parallel, 2, vocabulary, setup)
            found.append((Row(variant, _gpt(shown), asked, hardware), config))
    return found


def largest_model(
    setup: Setup, hardware: Hardware, vocabulary: int = VOCABULARY, *, near: int = 0
) -> ModelConfig | None:
    """The largest GPT of a usual shape that fits: first the largest width, then the largest depth at that width.

    The number of heads is a multiple of the ranks that share the model. ``near``: the width to try first.
    """
    ranks = setup.model_parallel
    step = ranks * head_width(ranks)  # from one hidden size to the next

    def room(steps: int, layers: int) -> float:
        model = _gpt(made_up(steps * ranks, layers, vocabulary, setup))
        row = Row(Variant("", setup.offload), model, setup, hardware)
        return min(row.room, row.host_room)

    def usual_size(steps: int) -> float:
        return float(usual_layers(steps * step) * steps**2)

    most = LARGEST_HIDDEN // step
    widest = largest_with_room(
        lambda steps: room(steps, usual_layers(steps * step)), most, usual_size, near=max(2, near // step)
    )
    if not widest:
        return None
    usual = usual_layers(widest * step)
    more = largest_with_room(lambda extra: room(widest, usual + extra), min(2 * usual, MOST_LAYERS - usual))
    return made_up(widest * ranks, usual + more, vocabulary, setup)


@lru_cache(maxsize=1024)  # the rows of a plan ask for the same models
def _gpt(config: ModelConfig) -> Model:
    return from_config(config)
