"""Pure maths: parameters → units → flats → shards. No tensor is made here and nothing is communicated.

A *unit* is the set of parameters that are gathered, reduced and updated together. Its parameters lie in one or
more *flats*: padded, contiguous buffers, one for each dtype and each answer to "is it trained?", none larger than
``max_unit_bytes`` unless one parameter alone is. Rank r of N owns the r-th N-th of every flat: its *shard*.

The layout counts in elements and does not depend on the dtype in use, so that a master in fp32, a parameter in
bf16 and a checkpoint of either agree on where every element is.
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
"""What it is called where names are read."""

REPEATED_SHARE = 0.05
"""A container of repeated blocks is worth units of its own when the blocks hold this share of the parameters."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``.

    >>> round_up(65, 64)
    128
    """
    return -(-value // multiple) * multiple


@lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a tensor without gaps. Asked for every parameter in every step.

    >>> contiguous_strides((4, 3, 2))
    (6, 2, 1)
    """
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class Box(NamedTuple):
    """Which part of a parameter a rank has at all, where tensor parallelism divides it: a range of every axis.

    >>> Box(whole=(8, 6), offsets=(4, 0)).part(torch.arange(48).view(8, 6), (2, 6))[:, 0].tolist()
    [24, 30]
    """

    whole: tuple[int, ...]
    """Shape of the whole parameter."""
    offsets: tuple[int, ...]
    """Where the part begins on each axis of the whole."""

    def part(self, whole: Tensor, shape: Sequence[int]) -> Tensor:
        """The part, which has this shape, as a view of the whole."""
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
    """Where the part belongs in the whole parameter; None where tensor parallelism leaves it whole."""

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the parameter, whatever tensor parallelism leaves of it here."""
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
    """Slots of a flat, and how N ranks share it."""

    slots: tuple[Slot, ...]
    world: int
    shard_numel: int

    @property
    def numel(self) -> int:
        """Elements of the whole flat, padding included."""
        return self.shard_numel * self.world

    @property
    def parameters(self) -> int:
        """Elements of the parameters alone."""
        return sum(slot.numel for slot in self.slots)

    @property
    def whole(self) -> Range:
        return Range(0, self.numel)

    def shard(self, rank: int) -> Range:
        """The range that ``rank`` owns."""
        return Range(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def pieces(self, part: Range) -> tuple[Piece, ...]:
        """The parameters, or parts of them, inside ``part``; empty parameters and padding have none."""
        found = []
        for index, slot in enumerate(self.slots):
            start, stop = max(slot.start, part.start), min(slot.stop, part.stop)
            if start < stop:
                found.append(Piece(index, start - slot.start, stop - slot.start, start - part.start))
        return tuple(found)

    @cached_property
    def padding(self) -> tuple[Range, ...]:
        """The ranges that belong to no parameter."""
        gaps, end = [], 0
        for slot in self.slots:
            if slot.start > end:
                gaps.append(Range(end, slot.start))
            end = slot.stop
        if self.numel > end:
            gaps.append(Range(end, self.numel))
        return tuple(gaps)


def flat_layout(
    parameters: Iterable[tuple[str, Sequence[int]]], world: int, boxes: Mapping[str, Box] | None = None
) -> FlatLayout:
    """Lays named shapes one after the other, each on a boundary, and pads the end so that N equal shards come out.

    ``boxes`` are those of the parameters of which the shape is that of a part.

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
    """A unit before it has buffers: the module whose calls it follows, and its parameters by name."""

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

    Without ``chosen``, every outermost ModuleList or Sequential with at least two elements of one class that together
    hold a fair share of the model gives its elements. (Not only the largest container: an encoder-decoder has two, a
    ResNet four.) ``itemsize`` is the bytes of an element when parameters are cast; by default each one's own.
    ``numel`` counts the elements that a rank has of a parameter, or that the one with the largest part has.
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
    """Groups a unit's parameters into those of one flat: same dtype, same trainability, bounded size.

    Those that tensor parallelism has divided are kept apart from those that each of its ranks has whole: a norm adds
    up the one kind over these ranks, and counts the other once.
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
            held = sum(p.numel() for p in nn.ModuleList(repeated).parameters())
            if repeated and held >= REPEATED_SHARE * total:
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
        if isinstance(choice, str):
            hits = {name: module for name, module in named.items() if name and _matches(name, choice)}
        else:
            hits = {name: module for name, module in named.items() if name and isinstance(module, choice)}
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


def _matches(name: str, pattern: str) -> bool:
    """Whether a dotted name fits a pattern whose wildcards each stand inside one part: ``blocks.*``."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


READS_ITS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that use a child's parameters without calling it, so that no unit can follow the child."""


def _split(module: nn.Module, too_big: Callable[[nn.Module], bool]) -> list[nn.Module]:
    children = [part for child in module.children() for part in _callable_parts(child)]
    if not too_big(module) or not children or isinstance(module, READS_ITS_CHILDREN):
        return [module]
    return [part for child in children for part in _split(child, too_big)]


def _callable_parts(module: nn.Module) -> list[nn.Module]:
    """What has no forward (a ModuleList, a ParameterDict) is never called, so no unit can follow it: take its parts."""
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        return [part for child in module.children() for part in _callable_parts(child)]
    return [module] if _has_parameters(module) else []


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _parameters_outside(model: nn.Module, inside: set[int]) -> set[nn.Parameter]:
    found: set[nn.Parameter] = set()

    def visit(module: nn.Module) -> None:
        if id(module) in inside:
            return
        found.update(module.parameters(recurse=False))
        for child in module.children():
            visit(child)

    visit(model)
    return found
