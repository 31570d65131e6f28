"""What one trace saw: the bytes that were alive at every moment, and the work, of each unit that was traced.

A recording knows a few blocks and one batch. ``trace_of`` makes from it the trace of the whole model; ``Traces`` makes
from two recordings those of a model some of whose blocks are recomputed. ``at_batch`` makes from two recordings the
recording of any batch: the size of every tensor is a constant and a part for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import NamedTuple, TypeVar, cast

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
    DEPOSITING = 5
    """As BACKWARD, after the first gradients of the unit were copied to their buffer. The buffer does not count."""


class Outline(NamedTuple):
    """The model that was traced: all its units, and which of its blocks were traced."""

    units: tuple[UnitShape, ...]
    sample: Sample
    buffers: int
    """Bytes."""
    blocks: tuple[str, ...]
    """The names of all blocks, those included that were not traced."""

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
        container = self.blocks[-1].rpartition(".")[0]
        return Outline(
            (*(unit for unit in self.units if unit.block < last), *added, *ending),
            Sample(self.sample.traced, (*places, *[places[-1]] * blocks, final)),
            self.buffers,
            (*self.blocks, *(f"{container}.{last + number}" for number in range(blocks))),
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


class _Source:
    """A recording, and which of its units stands for each unit of the model."""

    def __init__(self, seen: Recording, model: Outline) -> None:
        self.seen, self.kinds = seen, _unit_kinds(model.units, model.sample)
        self.places = [1 + place for place in model.sample.stands_for]
        """For each block: the traced block that stands for it."""
        self.before = [0, *accumulate(seen.growth)]
        """What units before each traced unit have saved."""
        self._peaks: dict[tuple[Moment, int], int] = {}

    def peak(self, moment: Moment, kind: int) -> int:
        """The most bytes that were alive at a moment of a traced unit."""
        key = moment, kind
        if moment is Moment.DEPOSITING and key not in self.seen.alive:
            return self.peak(Moment.BACKWARD, kind)  # frozen, or its gradients came in another unit's backward
        if key not in self._peaks:
            self._peaks[key] = max(self.seen.alive.get(key, (0,)))
        return self._peaks[key]


class Traces:
    """The traces of a model some of whose blocks ``shard(activations=...)`` recomputes, from two recordings."""

    def __init__(
        self,
        recording: tuple[Recording, Outline],
        keeping: Callable[[], tuple[Recording, Outline]] | None,
        width: int,
        *,
        ranks: int = 1,
        on_host: bool = False,
    ) -> None:
        """``recording``: of the model as it is asked for. ``keeping``: records it with all activations kept.

        ``width``: bytes of a parameter. ``ranks``: those that divide checkpoints. ``on_host``: checkpoints go there.
        """
        self._recomputing, self._keeping, self._made = recording, keeping, _Source(*recording)
        self._kept: _Source | None = None
        self._width, self._ranks, self._on_host = width, ranks, on_host

    @property
    def blocks(self) -> tuple[str, ...]:
        return self._recomputing[1].blocks

    def trace(self, recomputed: Sequence[bool] | None = None) -> Trace:
        """The trace of the whole model, whose blocks equal those that were traced. ``recomputed``: by block."""
        (seen, model), ranks, width = self._recomputing, self._ranks, self._width
        chosen = [True] * len(model.blocks) if recomputed is None else list(recomputed)
        if not all(chosen) and self._kept is None:
            assert self._keeping is not None
            self._kept, self._keeping = _Source(*self._keeping()), None  # it may hold the model and its example
        sources = [self._made if own else cast(_Source, self._kept) for own in (*(chosen[-1:] or [True]), *chosen)]
        parts = [(sources[unit.block], sources[unit.block].kinds[number]) for number, unit in enumerate(model.units)]
        blocks = [self._made.places[number] for number, own in enumerate(chosen) if own]

        def of_units(read: Callable[[Recording], Sequence[Number]]) -> tuple[Number, ...]:
            lists = {id(source): read(source.seen) for source in {id(one): one for one in sources}.values()}
            return tuple(lists[id(source)][kind] for source, kind in parts)

        stored = [[min(part_of(size, ranks), size) for size in sizes] for sizes in seen.checkpoints]
        host = [sum(aligned(width * size) for size in sizes) if self._on_host else 0 for sizes in stored]
        gathered = [
            sum(ranks * part_of(size, ranks) for size in sizes) if ranks > 1 else 0 for sizes in seen.checkpoints
        ]
        forward, backward = of_units(lambda seen: seen.forward_flops), of_units(lambda seen: seen.backward_flops)
        return Trace(
            units=model.units,
            buffers=model.buffers,
            activations=_activations(parts, sum(host[block] for block in blocks)),
            kinds=tuple(kind if source is self._made else len(seen.growth) + kind for source, kind in parts),
            forward_flops=forward,
            matrix_flops=of_units(lambda seen: seen.matrix_flops),
            forward_written=tuple(size / width for size in of_units(lambda seen: seen.written)),
            backward_ratio=sum(backward[1:]) / sum(forward[1:]) if sum(forward[1:]) else 2.0,
            logits=seen.logits,
            recomputes=seen.recomputes and any((*chosen, not chosen)),
            kept=frozenset(number for number, own in enumerate(chosen, start=1) if not own),
            stream=of_units(lambda seen: seen.stream),
            checkpoints=width * sum(sum(stored[block]) for block in blocks),
            gathered_checkpoints=sum(gathered[block] for block in blocks),
            tokens_known=seen.tokens_known,
        )


def trace_of(seen: Recording, model: Outline, width: int, *, ranks: int = 1, on_host: bool = False) -> Trace:
    """The trace of the whole model, all of whose blocks were treated as in the recording."""
    return Traces((seen, model), None, width, ranks=ranks, on_host=on_host).trace()


def _activations(parts: Sequence[tuple[_Source, int]], host: int) -> ActivationBytes:
    """What is alive while a unit runs is what was alive in its equal, and what all units before it have saved.

    ``parts``: for each unit of the model, the recording and the unit in it that stands for it.
    """
    whole = [0, *accumulate(source.seen.growth[kind] for source, kind in parts)]
    """What units before each unit of the model have saved."""
    up = [whole[number] - source.before[kind] for number, (source, kind) in enumerate(parts)]
    last = {(id(source), kind): number for number, (source, kind) in enumerate(parts)}
    """Where in the model the last equal of a traced unit is."""
    first, final = parts[1 % len(parts)][0], parts[-1][0]
    added = whole[-1] - final.before[-1]

    def of_units(moment: Moment, root: Moment, *, after: bool) -> tuple[int, ...]:
        of_root = (
            source.peak(root, kind) + whole[number + after] - source.before[kind + after]
            for number, (source, kind) in enumerate(parts)
            if last[id(source), kind] == number and (root, kind) in source.seen.alive
        )
        found = (source.peak(moment, kind) + more for (source, kind), more in zip(parts[1:], up[1:], strict=True))
        return max(of_root, default=0), *found

    return ActivationBytes(
        saved=final.seen.saved + added,
        forward=of_units(Moment.FORWARD, Moment.ROOT_FORWARD, after=True),
        loss=final.peak(Moment.LOSS, 0) + added,
        backward=of_units(Moment.BACKWARD, Moment.ROOT_BACKWARD, after=False),
        depositing=of_units(Moment.DEPOSITING, Moment.ROOT_BACKWARD, after=False),
        after_backward=(
            first.seen.after[0],
            *(source.seen.after[kind] + more for (source, kind), more in zip(parts[1:], up[1:], strict=True)),
        ),
        host=host,
        early_root_gradients=final.seen.early,
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
