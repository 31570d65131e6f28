"""Which blocks of a model are equal. A few of each kind are traced, and the plan counts how often each kind occurs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

FEW = 8
"""Containers with at most so many blocks are traced as they are."""
SIMPLE = (bool, int, float, str, type(None))


class Sample(NamedTuple):
    """The blocks of a model that are traced, in their order."""

    traced: tuple[int, ...]
    """Their numbers among all blocks."""
    stands_for: tuple[int, ...]
    """For every block: the position in ``traced`` of the block that is traced for it."""

    @classmethod
    def whole(cls, blocks: int) -> Sample:
        """All blocks."""
        return cls(tuple(range(blocks)), tuple(range(blocks)))


def take_sample(model: nn.Module, blocks: Sequence[nn.Module], first: int) -> Sample:
    """Removes blocks from long containers of a model: ``first`` blocks of each kind stay, and the last of each kind.

    The first blocks of a kind may differ from those in the middle in what is alive, and so may the last.

    >>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    >>> take_sample(model, list(model), first=2)
    Sample(traced=(0, 1, 11), stands_for=(0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2))
    >>> len(model)
    3
    """
    containers = _containers(model, blocks)
    kinds: dict[int, object] = {}
    for container, members in containers.items():
        for number, kind in zip(members, _kinds([blocks[number] for number in members]), strict=True):
            kinds[number] = (container, kind) if len(members) > FEW else number
    by_kind = defaultdict(list)
    for number in range(len(blocks)):
        by_kind[kinds.get(number, number)].append(number)
    traced = sorted({number for equal in by_kind.values() for number in (*equal[:first], equal[-1])})
    position = {number: place for place, number in enumerate(traced)}
    usual = {kind: position[equal[:first][-1]] for kind, equal in by_kind.items()}
    stands_for = tuple(
        position[number] if number in position else usual[kinds.get(number, number)] for number in range(len(blocks))
    )
    _remove(model, [block for number, block in enumerate(blocks) if number not in position])
    return Sample(tuple(traced), stands_for)


def _containers(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[int, list[int]]:
    """By container: the numbers of the blocks that are its elements. A block in two containers is in none here."""
    numbers = {id(block): number for number, block in enumerate(blocks)}
    found: dict[int, list[int]] = {}
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            members = [numbers[id(child)] for child in module if id(child) in numbers]
            if members:
                found[id(module)] = members
    often = Counter(number for members in found.values() for number in members)
    return {key: members for key, members in found.items() if all(often[number] == 1 for number in members)}


def _remove(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    gone = {id(block) for block in blocks}
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList | nn.Sequential):
            for place in reversed([place for place, child in enumerate(module) if id(child) in gone]):
                del module[place]


def _kinds(blocks: Sequence[nn.Module]) -> list[object]:
    """For each block a description. Equal descriptions mean equal work.

    An attribute that is another number in every block that has it is the block's place, and does not count.
    """
    described = [dict(_facts(block)) for block in blocks]
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for one in described:
        for name, value in one.items():
            if type(value) is int:
                numbers[name].append(value)
    places = {name for name, values in numbers.items() if len(set(values)) == len(values) > 1}
    return [tuple((name, value) for name, value in one.items() if name not in places) for one in described]


def _facts(block: nn.Module) -> Iterator[tuple[str, object]]:
    for name, module in block.named_modules():
        yield f"{name}:class", type(module)
        for attribute, value in vars(module).items():
            if isinstance(value, SIMPLE):
                yield f"{name}.{attribute}", value
    for name, tensor in (*block.named_parameters(), *block.named_buffers()):
        yield f"{name}:tensor", (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
