"""Pure maths: parameters → units → flats → shards. No tensor is made here and nothing is communicated.

A *unit* is a set of parameters that are gathered, reduced and updated together. Its parameters lie in one or more
*flats*: padded, contiguous buffers. Parameters of different dtypes, and trained and frozen parameters, lie in different
flats. No flat is larger than ``max_unit_bytes``, unless one parameter alone is. Every flat is divided into N equal
parts, and rank r of N owns the r-th part: its *shard*.

The layout counts in elements and does not depend on the dtype. So an element has the same place in a master in fp32, in
a parameter in bf16 and in a checkpoint of either.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Every parameter and every shard starts at a multiple of this: 128 bytes in 16 bit, and more in wider types."""

ROOT = ""
"""Name of the root unit, as ``named_modules`` names the root module."""
ROOT_TITLE = "(root)"
"""Name of the root unit in messages."""

UNLIMITED = 1 << 62
"""As ``max_unit_bytes``: no block is split."""

REPEATED_SHARE = 0.05
"""Repeated blocks of a container become units if they have at least this share of the parameters."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``.

    >>> round_up(65, 64)
    128
    """
    return -(-value // multiple) * multiple


@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps. Cached, because every step asks for every parameter.

    >>> contiguous_strides((4, 3, 2))
    (6, 2, 1)
    """
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class Box(NamedTuple):
    """The part of a parameter that tensor parallelism gives to a rank: a range of every axis.

    >>> Box(whole=(8, 6), offsets=(4, 0)).part(torch.arange(48).view(8, 6), (2, 6))[:, 0].tolist()
    [24, 30]
    """

    whole: tuple[int, ...]
    """Shape of the whole parameter."""
    offsets: tuple[int, ...]
    """Where the part begins on each axis of the whole."""

    def part(self, whole: Tensor, shape: Sequence[int]) -> Tensor:
        """The part as a view of the whole. ``shape`` is the shape of the part."""
        for axis, (offset, size) in enumerate(zip(self.offsets, shape, strict=True)):
            whole = whole.narrow(axis, offset, size)
        return whole


class Slot(NamedTuple):
    """Where one parameter, or this rank's part of it, lies in its flat."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    box: Box | None = None
    """The place of the part in the whole parameter. None if tensor parallelism does not divide the parameter."""

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the parameter before tensor parallelism divides it."""
        return self.shape if self.box is None else self.box.whole

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that has the parameter's whole shape."""
        return whole if self.box is None else self.box.part(whole, self.shape)

    def view(self, whole: Tensor) -> Tensor:
        """The parameter as a view of a whole flat."""
        return whole.as_strided(self.shape, contiguous_strides(self.shape), whole.storage_offset() + self.start)


class Piece(NamedTuple):
    """The part of one parameter that lies in a range of its flat."""

    slot: int
    """Index of the parameter's slot."""
    start: int
    """First element, counted inside the parameter."""
    stop: int
    """One past the last element, counted inside the parameter."""
    offset: int
    """Where the piece starts, counted from the start of the range."""

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Range(NamedTuple):
    """A half-open range of a flat."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """The slots of a flat, and how N ranks divide it."""

    slots: tuple[Slot, ...]
    world: int
    shard_numel: int

    @property
    def numel(self) -> int:
        """Elements of the whole flat, padding included."""
        return self.shard_numel * self.world

    @property
    def parameters(self) -> int:
        """Elements of the parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @property
    def whole(self) -> Range:
        return Range(0, self.numel)

    def shard(self, rank: int) -> Range:
        """The range that ``rank`` owns."""
        return Range(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def pieces(self, part: Range) -> tuple[Piece, ...]:
        """The parameters, or parts of them, inside ``part``. Empty parameters and padding have no pieces."""
        found = []
        for index, slot in enumerate(self.slots):
            start, stop = max(slot.start, part.start), min(slot.stop, part.stop)
            if start < stop:
                found.append(Piece(index, start - slot.start, stop - slot.start, start - part.start))
        return tuple(found)

    @cached_property
    def padding(self) -> tuple[Range, ...]:
        """The ranges that belong to no parameter."""
        ends = [0, *(slot.stop for slot in self.slots)]
        starts = [*(slot.start for slot in self.slots), self.numel]
        return tuple(Range(end, start) for end, start in zip(ends, starts, strict=True) if start > end)

    @cached_property
    def _parts(self) -> tuple[list[Slot | Range], list[int]]:
        """Slots and padding in one row, and how many elements each has."""
        parts: list[Slot | Range] = [*self.slots, *self.padding]
        parts.sort(key=lambda part: part.start)
        return parts, [part.numel for part in parts]

    def cut(self, whole: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters, and the padding between them, as views of a whole flat.

        One ``split`` for all: ``Slot.view`` of every parameter would cost twice as much.
        """
        slots, padding = [], []
        parts, sizes = self._parts
        for part, view in zip(parts, whole.split_with_sizes(sizes), strict=True):
            if isinstance(part, Range):
                padding.append(view)
            else:
                slots.append(view if len(part.shape) == 1 else view.view(part.shape))
        return slots, padding


def flat_layout(
    parameters: Iterable[tuple[str, Sequence[int]]], world: int, boxes: Mapping[str, Box] | None = None
) -> FlatLayout:
    """Lays named shapes one after the other, each on a boundary, and pads the end to get N equal shards.

    ``boxes`` has the box of each parameter whose shape is the shape of a part.

    >>> layout = flat_layout([("weight", (3, 5)), ("bias", (3,))], world=2)
    >>> [slot.start for slot in layout.slots], layout.shard_numel
    ([0, 64], 64)
    """
    slots, end = [], 0
    for name, shape in parameters:
        numel = math.prod(shape)
        slots.append(Slot(name, tuple(shape), end, numel, (boxes or {}).get(name)))
        end += round_up(numel, ALIGNMENT)
    return FlatLayout(tuple(slots), world, round_up(math.ceil(end / world), ALIGNMENT))


@dataclass(frozen=True)
class UnitSpec:
    """A unit before it has flats: the module whose calls gather and release it, and its parameters by name."""

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for _, parameter in self.parameters)


def find_units(
    model: nn.Module,
    *,
    chosen: Sequence[str | type[nn.Module]] | None = None,
    max_unit_bytes: int = 1 << 30,
    itemsize: int | None = None,
    numel: Callable[[nn.Parameter], int] = nn.Parameter.numel,
) -> list[UnitSpec]:
    """Divides a model's parameters into units: the root unit first, then the others in the order of ``modules()``.

    Without ``chosen``, units are the elements of every outermost ModuleList or Sequential in which at least two
    elements have the same class, and these have at least ``REPEATED_SHARE`` of the parameters. (Not only of the largest
    container: an encoder-decoder has two, a ResNet four.) ``itemsize`` is the bytes of an element after a cast, by
    default of the parameter's dtype. ``numel`` counts the elements of a parameter on the rank with the largest
    part of it.
    """
    modules = _chosen_modules(model, chosen) if chosen is not None else _repeated_modules(model)
    names = {id(module): name for name, module in model.named_modules()}

    def too_big(module: nn.Module) -> bool:
        return sum(numel(p) * (itemsize or p.element_size()) for p in module.parameters()) > max_unit_bytes

    divided = [part for module in modules for part in _split(module, too_big)]
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in divided:
        for parameter in module.parameters():
            owners.setdefault(parameter, []).append(module)
    outside = _parameters_outside(model, {id(module) for module in divided})

    members: dict[int, list[tuple[str, nn.Parameter]]] = {id(module): [] for module in divided}
    root: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        mine = owners.get(parameter, [])
        shared = len(mine) != 1 or parameter in outside
        (root if shared else members[id(mine[0])]).append((name, parameter))
    units = [UnitSpec(names[id(module)], module, tuple(members[id(module)])) for module in divided]
    return [UnitSpec(ROOT, model, tuple(root)), *(unit for unit in units if unit.parameters)]


def divide_into_flats(
    parameters: Sequence[tuple[str, nn.Parameter]],
    max_bytes: int,
    itemsize: int | None = None,
    *,
    numel: Callable[[nn.Parameter], int] = nn.Parameter.numel,
    divided: Callable[[nn.Parameter], bool] = lambda _: False,
) -> list[list[tuple[str, nn.Parameter]]]:
    """Groups the parameters of a unit into flats: same dtype, all trained or all frozen, bounded size.

    Parameters that tensor parallelism divides lie in other flats than whole parameters. A norm adds up divided
    parameters over the ranks of tensor parallelism, and counts whole parameters once.
    """
    kinds: dict[tuple[torch.dtype, bool, bool], list[list[tuple[str, nn.Parameter]]]] = {}
    sizes: Counter[tuple[torch.dtype, bool, bool]] = Counter()
    for name, parameter in parameters:
        kind = (parameter.dtype, parameter.requires_grad, divided(parameter))
        size = round_up(numel(parameter), ALIGNMENT) * (itemsize or parameter.element_size())
        groups = kinds.setdefault(kind, [[]])
        if groups[-1] and sizes[kind] + size > max_bytes:
            groups.append([])
            sizes[kind] = 0
        groups[-1].append((name, parameter))
        sizes[kind] += size
    return [group for groups in kinds.values() for group in groups]


def _repeated_modules(model: nn.Module) -> list[nn.Module]:
    total = sum(parameter.numel() for parameter in model.parameters())
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        if isinstance(module, nn.ModuleList | nn.Sequential):
            elements = [child for child in module if _has_parameters(child)]
            classes = Counter(type(child) for child in elements)
            repeated = [child for child in elements if classes[type(child)] > 1]
            numel = sum(p.numel() for p in nn.ModuleList(repeated).parameters())
            if repeated and numel >= REPEATED_SHARE * total:
                found.extend(dict.fromkeys(repeated))
                return
        for child in module.children():
            visit(child)

    visit(model)
    return [part for module in dict.fromkeys(found) for part in _callable_parts(module)]


def _chosen_modules(model: nn.Module, chosen: Sequence[str | type[nn.Module]]) -> list[nn.Module]:
    named = dict(model.named_modules())
    picked: dict[str, nn.Module] = {}
    for choice in chosen:
        hits = {name: module for name, module in named.items() if name and _matches(name, module, choice)}
        if not hits:
            raise ValueError(
                f"units={choice!r} matches no module of {type(model).__name__}; "
                "give module names as named_modules() has them (wildcards allowed) or a module class"
            )
        picked |= hits
    for name in picked:
        inside = next((other for other in picked if name.startswith(other + ".")), None)
        if inside is not None:
            raise ValueError(f"units names {name!r} and {inside!r}, which contains it; units cannot be nested")
    return [part for name, module in named.items() if name in picked for part in _callable_parts(module)]


def _matches(name: str, module: nn.Module, choice: str | type[nn.Module]) -> bool:
    """Whether a module has a class, or a dotted name that fits a pattern. A wildcard matches inside one part of it."""
    if not isinstance(choice, str):
        return isinstance(module, choice)
    parts, patterns = name.split("."), choice.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


READS_ITS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that use the parameters of a child without calling the child. Such a child cannot be a unit."""


def _split(module: nn.Module, too_big: Callable[[nn.Module], bool]) -> list[nn.Module]:
    children = [part for child in module.children() for part in _callable_parts(child)]
    if not too_big(module) or not children or isinstance(module, READS_ITS_CHILDREN):
        return [module]
    return [part for child in children for part in _split(child, too_big)]


def _callable_parts(module: nn.Module) -> list[nn.Module]:
    """The module itself, or its parts if it has no forward (a ModuleList): a unit must be called to be gathered."""
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        return [part for child in module.children() for part in _callable_parts(child)]
    return [module] if _has_parameters(module) else []


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _parameters_outside(model: nn.Module, inside: set[int]) -> set[nn.Parameter]:
    """The parameters that can be reached without passing through one of the modules inside."""
    if id(model) in inside:
        return set()
    children = (_parameters_outside(child, inside) for child in model.children())
    return set(model.parameters(recurse=False)).union(*children)
