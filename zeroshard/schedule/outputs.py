"""Finds the tensors that a forward made, in its output and in attributes, and hooks them.

The hooks tell when the backward of the module begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..system import compat
from ..system.hook import Hook
from ..system.structures import tensors_in

MAY_CONTAIN_TENSORS = (Tensor, list, tuple, dict)
"""Classes of attributes that are searched. A tuple, because ``isinstance`` takes three times as long with a union."""

OF_UNIT, OF_MODEL = "zeroshard.unit", "zeroshard.model"
"""Marks of outputs that have a hook."""


class AttributeOutputs:
    """Tensors that a forward leaves in attributes of a unit's modules, such as the loss of a mixture of experts.

    The search runs after every call of the unit, so it must not walk through all attributes of all modules. A forward
    of torch leaves nothing in attributes. A layer with such a forward is searched only if it has hooks, if its number
    of attributes has changed, or if it has an attribute in which other code may leave a tensor.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._others: list[nn.Module] = []
        self._layers: list[tuple[nn.Module, int]] = []
        self._public: dict[nn.Module, tuple[tuple[str, ...], list[str]]] = {}
        """All names of a module's attributes at the last search, and the public ones: most are torch's private ones."""
        for module in modules:
            public = [value for name, value in vars(module).items() if name[0] != "_"]
            open_to_others = any(value is None or isinstance(value, Tensor | list | dict) for value in public)
            if type(module).forward.__module__.startswith("torch.nn.") and not open_to_others:
                self._layers.append((module, compat.count_attributes(module)))
            else:
                self._others.append(module)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules to search."""
        if compat.has_global_hooks():
            return self._others + [layer for layer, _ in self._layers]
        return self._others + compat.changed(self._layers)

    def values(self) -> list[Any]:
        """Tensors, and collections that may contain tensors."""
        found: list[Any] = []
        for module in self.modules:
            attributes = vars(module)
            names = tuple(attributes)
            known, public = self._public.get(module, ((), []))
            if names != known:
                public = [name for name in names if name[0] != "_"]
                self._public[module] = names, public
            found += [value for name in public if isinstance(value := attributes[name], MAY_CONTAIN_TENSORS)]
        return found


def hook_outputs(output: Any, hook: Hook, mark: str) -> int:
    """Hooks the tensors that a unit or the model made. Returns how many tensors have a ``grad_fn``.

    A tensor that was hooked before with the same ``mark`` is left alone: a unit that only passes a tensor on did not
    make it.
    """
    found = 0
    for tensor in tensors_in(output):
        node: Any = tensor.grad_fn
        if node is not None:
            found += 1
            hooked: set[int] = node.metadata.setdefault(mark, set())
            if tensor.output_nr not in hooked:
                hooked.add(tensor.output_nr)
                tensor.register_hook(hook)
    return found
