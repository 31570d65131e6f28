"""Documents packed into sequences of one length, and the sequences of every step.

An excerpt is a document, or a part of one that is longer than a sequence. A sequence holds whole excerpts. Each begins
at position 0, so that attention does not cross from one to another where the model can tell them apart. What is left of
a sequence is padding. Each token's target is the token after it in the same document, if that is trained on.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100
"""The target of a token whose successor is not predicted."""


class Excerpt(NamedTuple):
    """A range of tokens of one document."""

    start: int
    length: int


class Packed(NamedTuple):
    """Some sequences, each tensor [sequences, sequence] of int64."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    """Begin at 0 in each excerpt."""

    def to(self, device: torch.device) -> "Packed":
        """Return the same sequences on a device."""
        return Packed(*(tensor.to(device) for tensor in self))


@dataclass(frozen=True)
class Sequences:
    """Packed sequences of a list of documents."""

    tokens: Tensor
    """The tokens of all documents, one after the other."""
    targets: Tensor
    """The target of each token, or `IGNORED`."""
    packs: list[list[Excerpt]]
    """The excerpts of each sequence."""
    length: int
    """Tokens of a sequence."""

    @classmethod
    def pack(cls, tokens: Tensor, targets: Tensor, documents: Sequence[Excerpt], length: int, seed: int) -> "Sequences":
        """Pack documents, in an order that the seed decides."""
        excerpts = []
        learned = torch.cat([torch.zeros(1, dtype=torch.long), (targets != IGNORED).long().cumsum(0)])
        for number in torch.randperm(len(documents), generator=_generator(seed)).tolist():
            first, size = documents[number]
            cuts = [Excerpt(start, min(length, first + size - start)) for start in range(first, first + size, length)]
            excerpts += [cut for cut in cuts if learned[cut.start + cut.length] > learned[cut.start]]
        return cls(tokens, targets, pack(excerpts, length), length)

    def __len__(self) -> int:
        return len(self.packs)

    def learned(self, numbers: Sequence[int]) -> int:
        """Return how many tokens of these sequences are predicted."""
        excerpts = [excerpt for number in numbers for excerpt in self.packs[number]]
        return sum(int((self.targets[p.start : p.start + p.length] != IGNORED).sum()) for p in excerpts)

    def take(self, numbers: Sequence[int | None]) -> Packed:
        """Return sequences by their numbers; None stands for one of padding alone."""
        shape = len(numbers), self.length
        tokens, targets = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORED)
        positions = torch.zeros(shape, dtype=torch.long)
        for row, number in enumerate(numbers):
            excerpts = [] if number is None else self.packs[number]
            place = 0
            for start, size in excerpts:
                part = slice(place, place + size)
                tokens[row, part] = self.tokens[start : start + size].long()
                targets[row, part] = self.targets[start : start + size].long()
                positions[row, part] = torch.arange(size)
                place += size
            positions[row, place:] = torch.arange(self.length - place)  # the padding is an excerpt of its own
        return Packed(tokens, targets, positions)


def pack(excerpts: Sequence[Excerpt], length: int) -> list[list[Excerpt]]:
    """Put excerpts into as few sequences as is easily found: the longest first, each where least room is left.

    >>> found = pack([Excerpt(0, 3), Excerpt(3, 6), Excerpt(9, 2), Excerpt(11, 4)], length=8)
    >>> [[excerpt.start for excerpt in together] for together in found]
    [[3, 9], [11, 0]]
    """
    packs: list[list[Excerpt]] = []
    rooms: list[tuple[int, int]] = []
    """The room that is left in each sequence, and its number; the least first."""
    for excerpt in sorted(excerpts, key=lambda excerpt: -excerpt.length):
        place = bisect_left(rooms, (excerpt.length, 0))
        if place == len(rooms):
            packs.append([excerpt])
            room, number = length - excerpt.length, len(packs) - 1
        else:
            room, number = rooms.pop(place)
            packs[number].append(excerpt)
            room -= excerpt.length
        if room > 1:  # an excerpt of one token predicts nothing
            insort(rooms, (room, number))
    return packs


@dataclass(frozen=True)
class Order:
    """Which sequences each step trains on: all of them once an epoch, in an order that the seed decides."""

    sequences: int
    a_step: int
    seed: int

    def step(self, step: int) -> list[int]:
        """Return the numbers of the sequences of a step; the first step is 1.

        >>> order = Order(sequences=3, a_step=2, seed=0)
        >>> sorted(order.step(1) + order.step(2)[:1]), len(order.step(2))
        ([0, 1, 2], 2)
        """
        found: list[int] = []
        place, end = (step - 1) * self.a_step, step * self.a_step
        while place < end:
            epoch, first = divmod(place, self.sequences)
            shuffled = _shuffled(self.sequences, self.seed + 1 + epoch)
            found += shuffled[first : first + end - place].tolist()
            place = (step - 1) * self.a_step + len(found)
        return found


def divide(numbers: Sequence[int], rank: int, ranks: int, most: int) -> list[list[int | None]]:
    """Divide the sequences of a step: a list for each micro-batch of a rank, none longer than `most`.

    Every rank has the same number of micro-batches of the same sizes. None stands for padding.

    >>> divide([5, 6, 7], rank=1, ranks=2, most=1), divide(range(6), rank=0, ranks=1, most=4)
    ([[7], [None]], [[0, 1, 2], [3, 4, 5]])
    """
    each = -(-len(numbers) // ranks)
    mine: list[int | None] = [*numbers[rank * each : (rank + 1) * each]]
    mine += [None] * (each - len(mine))
    count = -(-each // most)
    ends = [each * part // count for part in range(count + 1)]
    return [mine[start:end] for start, end in pairwise(ends)]


@lru_cache(maxsize=2)
def _shuffled(count: int, seed: int) -> Tensor:
    """Return the numbers below `count` in an order that the seed decides. Kept, because every step asks for it."""
    return torch.randperm(count, generator=_generator(seed))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed % (1 << 63))
