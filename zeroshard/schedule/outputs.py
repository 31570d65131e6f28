"""What a module's forward gave, in its output or left in attributes: hooked, it tells when backward comes to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..system import compat
from ..system.hook import Hook
from ..system.structures import tensors_in

_KEPT = (Tensor, list, tuple, dict)


class AttributeOutputs:
    """What a unit's modules keep of a forward in attributes: the loss of a mixture of experts, say.

    Asked after every call of the unit, so it does not walk through all attributes of all modules. torch's own layers
    leave nothing by themselves. One of them is looked at only if it has hooks, more attributes than at first, or had
    one in which somebody else may leave something.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._others: list[nn.Module] = []
        self._layers: list[tuple[nn.Module, int]] = []
        for module in modules:
            public = [value for name, value in vars(module).items() if name[0] != "_"]
            open_to_others = any(value is None or isinstance(value, Tensor | list | dict) for value in public)
            if type(module).__module__.startswith("torch.nn.") and not open_to_others:
                self._layers.append((module, compat.count_attributes(module)))
            else:
                self._others.append(module)

    @property
    def modules(self) -> list[nn.Module]:
        """Those that may have left something."""
        everywhere = compat.has_global_hooks()
        return self._others + [
            layer
            for layer, count in self._layers
            if everywhere or compat.count_attributes(layer) != count or compat.has_forward_hooks(layer)
        ]

    def values(self) -> list[Any]:
        """Tensors, and collections that may hold some."""
        return [
            value
            for module in self.modules
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
