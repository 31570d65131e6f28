"""Names of parameters as checkpoints have them."""

from __future__ import annotations


def name_of(name: str) -> str:
    """A parameter's name without what ``torch.compile`` adds to it.

    >>> name_of("blocks.0._orig_mod.weight")
    'blocks.0.weight'
    """
    return name.replace("_orig_mod.", "")
