"""What one trace saw: the bytes that were alive at every moment, and the work, of each unit that was traced.

A recording knows a few blocks and one batch. ``trace_of`` makes from it the trace of the whole model. ``at_batch``
makes from two recordings the recording of any batch: the size of every tensor is a constant and a part for each sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import NamedTuple, TypeVar

from ...offload.pinned import aligned
from ...recompute.part import part_of
from .blocks import Sample
from .trace import ActivationBytes, Trace
from .units import UnitShape

Number = TypeVar("Number", int, float)


class Moment(Enum):
    """A part of a step, in which a unit or the root runs."""

    FORWARD = 0
    LOSS = 1
    BACKWARD = 2
    ROOT_FORWARD = 3
    """The root, after the forward of a unit."""
    ROOT_BACKWARD = 4
    """The root, after the backward of a unit began."""
    HELD = 5
    """As BACKWARD, and the gradients of the unit that have arrived are alive too."""


class Outline(NamedTuple):
    """The model that was traced: all its units, and which of its blocks were traced."""

    units: tuple[UnitShape, ...]
    sample: Sample
    buffers: int
    """Bytes."""

    @property
    def sampled(self) -> bool:
        """True if some blocks stand for others."""
        return len(self.sample.traced) < len(self.sample.stands_for)

    def with_more(self, blocks: int) -> Outline:
        """The same model with more blocks before the last one. They equal the block that stands there now."""
        if not blocks:
            return self
        last = len(self.sample.stands_for)
        ending = [UnitShape(last + blocks, unit.flats) for unit in self.units if unit.block == last]
        usual = [unit.flats for unit in self.units if unit.block == last - 1]
        added = [UnitShape(last + number, flats) for number in range(blocks) for flats in usual]
        *places, final = self.sample.stands_for
        return Outline(
            (*(unit for unit in self.units if unit.block < last), *added, *ending),
            Sample(self.sample.traced, (*places, *[places[-1]] * blocks, final)),
            self.buffers,
        )


@dataclass(frozen=True)
class Recording:
    """What a trace saw. Lists go by traced unit, the root first; ``checkpoints`` go by traced block."""

    alive: Mapping[tuple[Moment, int], Sequence[int]]
    """Bytes that were alive at each moment of a unit, whenever they grew."""
    growth: Sequence[int]
    """Bytes by which the forward of a unit increased what is alive."""
    after: Sequence[int]
    """Bytes that were alive when the last gradient of a unit arrived."""
    stream: Sequence[int]
    """Bytes of activations that a unit got."""
    written: Sequence[int]
    """Bytes of activations that forward wrote."""
    forward_flops: Sequence[float]
    matrix_flops: Sequence[float]
    backward_flops: Sequence[float]
    logits: float
    saved: int
    early: int
    """Bytes of the root's gradients that arrived before those of the blocks."""
    checkpoints: Sequence[Sequence[int]]
    """Elements of each tensor that a recomputed block stored."""
    recomputes: bool
    tokens_known: bool

    def like(self, other: Recording) -> bool:
        """True if both recordings saw the same moments."""
        moments = {key: len(sizes) for key, sizes in self.alive.items()}
        stored = [len(sizes) for sizes in self.checkpoints]
        return moments == {key: len(sizes) for key, sizes in other.alive.items()} and stored == [
            len(sizes) for sizes in other.checkpoints
        ]


def at_batch(fewer: Recording, more: Recording, steps: int) -> Recording:
    """The recording of ``steps`` samples more than ``fewer`` has. ``more`` has one sample more than ``fewer``."""

    def one(start: Number, end: Number) -> Number:
        return start + steps * (end - start)

    def each(start: Sequence[Number], end: Sequence[Number]) -> list[Number]:
        return [one(a, b) for a, b in zip(start, end, strict=True)]

    return Recording(
        alive={key: each(sizes, more.alive[key]) for key, sizes in fewer.alive.items()},
        growth=each(fewer.growth, more.growth),
        after=each(fewer.after, more.after),
        stream=each(fewer.stream, more.stream),
        written=each(fewer.written, more.written),
        forward_flops=each(fewer.forward_flops, more.forward_flops),
        matrix_flops=each(fewer.matrix_flops, more.matrix_flops),
        backward_flops=each(fewer.backward_flops, more.backward_flops),
        logits=one(fewer.logits, more.logits),
        saved=one(fewer.saved, more.saved),
        early=one(fewer.early, more.early),
        checkpoints=[each(a, b) for a, b in zip(fewer.checkpoints, more.checkpoints, strict=True)],
        recomputes=fewer.recomputes,
        tokens_known=fewer.tokens_known,
    )


def trace_of(seen: Recording, model: Outline, width: int, *, ranks: int = 1, on_host: bool = False) -> Trace:
    """The trace of the whole model, whose blocks equal those that were traced.

    ``width``: bytes of a parameter. ``ranks``: those that divide checkpoints. ``on_host``: checkpoints go to the host.
    """
    kinds = _unit_kinds(model.units, model.sample)
    blocks = [1 + place for place in model.sample.stands_for]

    def repeated(numbers: Sequence[Number]) -> tuple[Number, ...]:
        return tuple(numbers[kind] for kind in kinds)

    stored = [[min(part_of(size, ranks), size) for size in sizes] for sizes in seen.checkpoints]
    host = [sum(aligned(width * size) for size in sizes) if on_host else 0 for sizes in stored]
    gathered = [sum(ranks * part_of(size, ranks) for size in sizes) if ranks > 1 else 0 for sizes in seen.checkpoints]
    forward, backward = repeated(seen.forward_flops), repeated(seen.backward_flops)
    return Trace(
        units=model.units,
        buffers=model.buffers,
        activations=_activations(seen, kinds, sum(host[block] for block in blocks)),
        kinds=kinds,
        forward_flops=forward,
        matrix_flops=repeated(seen.matrix_flops),
        forward_written=tuple(size / width for size in repeated(seen.written)),
        backward_ratio=sum(backward[1:]) / sum(forward[1:]) if sum(forward[1:]) else 2.0,
        logits=seen.logits,
        recomputes=seen.recomputes,
        stream=repeated(seen.stream),
        checkpoints=width * sum(sum(stored[block]) for block in blocks),
        gathered_checkpoints=sum(gathered[block] for block in blocks),
        tokens_known=seen.tokens_known,
    )


def _activations(seen: Recording, kinds: Sequence[int], host: int) -> ActivationBytes:
    """What is alive while a unit runs is what was alive in its equal, and what all units before it have saved."""
    before = [0, *accumulate(seen.growth)]  # what units before each unit have saved: in the trace, in the model
    whole = [0, *accumulate(seen.growth[kind] for kind in kinds)]
    more = [there - before[kind] for there, kind in zip(whole, kinds, strict=False)]
    added = whole[-1] - before[-1]
    last = {kind: number for number, kind in enumerate(kinds)}
    """Where in the model the last equal of a traced unit is."""

    def peak(moment: Moment, kind: int) -> int:
        return max(seen.alive.get((moment, kind), (0,)))

    def of_units(moment: Moment, root: Moment, *, after: bool) -> tuple[int, ...]:
        peaks = {kind: peak(moment, kind) for kind in set(kinds)}
        of_root = (
            peak(root, kind) + whole[number + after] - before[kind + after]
            for kind, number in last.items()
            if (root, kind) in seen.alive
        )
        return max(of_root, default=0), *(peaks[kind] + up for kind, up in zip(kinds[1:], more[1:], strict=True))

    return ActivationBytes(
        saved=seen.saved + added,
        forward=of_units(Moment.FORWARD, Moment.ROOT_FORWARD, after=True),
        loss=peak(Moment.LOSS, 0) + added,
        backward=of_units(Moment.BACKWARD, Moment.ROOT_BACKWARD, after=False),
        backward_held=of_units(Moment.HELD, Moment.ROOT_BACKWARD, after=False),
        after_backward=(seen.after[0], *(seen.after[kind] + up for kind, up in zip(kinds[1:], more[1:], strict=True))),
        host=host,
        early_root_gradients=seen.early,
    )


def _unit_kinds(units: Sequence[UnitShape], sample: Sample) -> tuple[int, ...]:
    """For each unit of the model: the number of the traced unit that it equals."""
    members: dict[int, int] = {}
    for unit in units:
        members[unit.block] = members.get(unit.block, 0) + 1
    sizes = [members[block] for block in sorted(members) if block]
    first, traced = [], 1
    for place in range(len(sample.traced)):
        first.append(traced)
        traced += sizes[sample.stands_for.index(place)]
    found = (first[place] + part for size, place in zip(sizes, sample.stands_for, strict=True) for part in range(size))
    return 0, *found
