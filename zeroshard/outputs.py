"""What a module's forward gave, in its output or left in attributes: hooked, it tells when backward comes to it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .hook import Hook
from .precision import tensors_in

_KEPT = (Tensor, list, tuple, dict)


def left_in_attributes(modules: list[nn.Module]) -> list[Any]:
    """What modules may have kept of a forward: tensors, or collections, in attributes of their own."""
    return [
        value
        for module in modules
        for name, value in vars(module).items()
        if name[0] != "_" and isinstance(value, _KEPT)
    ]


def hook_outputs(output: Any, hook: Hook, whose: str) -> int:
    """Hooks the tensors that a unit, or the model, made; returns how many tensors have a history at all.

    One that it only passes on belongs to who made it.
    """
    found = 0
    for tensor in tensors_in(output):
        node: Any = tensor.grad_fn
        if node is not None:
            found += 1
            hooked: set[int] = node.metadata.setdefault(f"zeroshard.{whose}", set())
            if tensor.output_nr not in hooked:
                hooked.add(tensor.output_nr)
                tensor.register_hook(hook)
    return found
