"""The memory of one rank at every moment of a step that could be the peak.

The phases of a step are followed unit by unit. At each moment the bytes in addition to model states are added up:
activations, gathered parameters (stage 3), gradients that are not yet shards or not yet on the host, and the
temporaries of the update. In a long run of equal blocks only the first and the last blocks are followed, because no
peak lies between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain, groupby, islice, takewhile

import torch

from ...config.bounds import DEPOSIT_BYTES, FIRST_ELEMENTS, IN_FLIGHT, UPDATE_ELEMENTS
from ...config.table import Extent, state_table
from ...offload.host_buffers import HostBytes, bytes_of, wanted
from ...offload.pinned import aligned
from ...offload.pipeline import HIGH_HALVES, LANDING, RING
from ..model.trace import Trace
from ..setup import Setup
from .device_memory import DeviceMemory, Phase
from .rank_units import FP32, RankFlat, RankUnit, place
from .start import most_at_start

PARAMETER_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Moment = tuple[Phase, dict[str, int]]
"""A phase, and the bytes by kind in addition to ``RankMemory.rest``."""


class RankMemory:
    """The memory of one rank: at rest, and at each moment that could be the peak."""

    def __init__(self, setup: Setup, traced: Trace, workspace: int) -> None:
        self.setup, self.activations = setup, traced.activations
        self.buffers, self.workspace = traced.buffers, workspace
        self._kinds, self._keeping = traced.kinds or tuple(range(len(traced.units))), traced.kept
        self.width = setup.width
        self.table = state_table(setup.stage, setup.world, setup.offload)
        self.sharded = self.table.parameters.extent is Extent.SHARD
        self.units = place(setup, traced.units)
        self.flats: Counter[RankFlat] = Counter()
        """The number of flats of each shape."""
        for flats, count in Counter(unit.flats for unit in self.units).items():
            for flat in flats:
                self.flats[flat] += count
        self._blocks: dict[int, list[RankUnit]] = {}
        for unit in self.units:
            self._blocks.setdefault(unit.block, []).append(unit)

    # -- at rest --------------------------------------------------------------------------------------------------

    @cached_property
    def rest(self) -> DeviceMemory:
        """The memory that is in use during the whole step."""
        on_host = self.setup.offload is not None and self.setup.offload.parameters == "cpu"
        parameters = sum(count * (f.shard if self.sharded else f.whole) for f, count in self.flats.items())
        if on_host or self.setup.cast_on_gather:
            parameters = 0
        states = accumulators = 0
        for flat, count in self.flats.items():
            if flat.shape.trained and not flat.on_host:
                moments = self.setup.moments * round(flat.shape.parameters * flat.own / flat.whole)
                states += count * (self.setup.master_width * flat.own + self.setup.moment_width * moments)
                accumulators += count * FP32 * self._accumulated(flat) if self.accumulates else 0
        return DeviceMemory(
            parameters=self.width * parameters,
            optimizer_states=states,
            accumulators=accumulators,
            buffers=self.buffers,
            temporary=self.workspace,
        )

    @property
    def accumulates(self) -> bool:
        return self.setup.micro_batches > 1

    def _accumulated(self, flat: RankFlat) -> int:
        """Elements of an accumulator. In fp32 the averaged gradient itself is one, whole where gradients are whole."""
        whole = self.width == FP32 and self.table.gradients.extent is Extent.WHOLE
        return flat.whole if whole else flat.own

    def stashed(self, flat: RankFlat) -> int:
        """Bytes of an averaged gradient on the device, where it waits for the update."""
        if flat.on_host or self.accumulates or not flat.shape.trained:
            return 0
        return self.width * (flat.own if self.table.gradients.extent is Extent.SHARD else flat.whole)

    @cached_property
    def _all_stashed(self) -> int:
        return sum(count * self.stashed(flat) for flat, count in self.flats.items())

    @property
    def at_step(self) -> DeviceMemory:
        return self.rest.with_more({"gradients": self._all_stashed, "temporary": -self.workspace})

    @property
    def between_steps(self) -> DeviceMemory:
        gathered = self._gathered(self._gathered_early)
        return self.rest.with_more({"gathered": gathered, "temporary": -self.workspace})

    @property
    def _gathered_early(self) -> Sequence[RankUnit]:
        """The units gathered during the update for the next forward: those before the first unit on the host."""
        first = self.units[: 1 + self.setup.prefetch]
        return list(takewhile(lambda unit: not any(flat.on_host for flat in unit.flats), first))

    @cached_property
    def host(self) -> HostBytes:
        offload, dtype = self.setup.offload, PARAMETER_DTYPES[self.setup.precision]
        checkpoints = HostBytes(pinned=self.activations.host)
        if offload is None:
            return checkpoints
        names = [str(number) for number in range(self.setup.moments)]
        found, largest = HostBytes(), 0
        for flat, count in self.flats.items():
            if flat.on_host:
                found += bytes_of(wanted(offload, dtype, names), flat.own) * count
                largest = max(largest, aligned(self.width * flat.own))
                if self.accumulates:
                    found += HostBytes(pageable=count * FP32 * flat.own)
            elif not flat.shape.trained:
                found += bytes_of(wanted(offload, dtype, None), flat.shard) * count
        turns = RING * offload.update_in_backward + HIGH_HALVES * offload.read_back
        return found + checkpoints + HostBytes(pinned=largest * turns)

    # -- phases ---------------------------------------------------------------------------------------------------

    def moments(self) -> Iterator[Moment]:
        """All moments that could be the peak."""
        if self.setup.first_values is not None:
            most = most_at_start(self.setup, self.units, self.rest, sharded=self.sharded)
            yield Phase.START, {"temporary": most - self.rest.total}
        yield from self._forward()
        yield (
            Phase.LOSS,
            {
                "activations": self.activations.loss,
                "gathered": self._gathered([self.units[0], *self._kept_before(len(self.units)), *self._turning()]),
            },
        )
        yield from self._backward()
        yield from self._update()

    @cached_property
    def _peak_candidates(self) -> list[int]:
        """The numbers of the units whose forward or backward can have the peak.

        In the middle of a run of blocks of one kind, two neighbours differ only in activations and gradients. Both
        change by the same amount from block to block, so the maximum is at one end of the run.
        """
        near = 1 + max(self.setup.prefetch + 1, self.setup.keep, IN_FLIGHT + LANDING)
        found: list[int] = []
        number = 0
        for _, equal in groupby(self._blocks.values(), key=self._block_key):
            stretch = list(equal)
            for position, units in enumerate(stretch):
                if not near <= position < len(stretch) - near:
                    found += range(number, number + len(units))
                number += len(units)
        return found

    def _block_key(self, units: Sequence[RankUnit]) -> tuple[object, ...]:
        """The properties that equal blocks share."""
        return tuple((self._kinds[unit.number], unit.flats) for unit in units)

    def _forward(self) -> Iterator[Moment]:
        for number in self._peak_candidates:
            unit = self.units[number]
            following = self.units[number + 1 : number + 1 + self.setup.prefetch]
            yield (
                Phase.FORWARD,
                {
                    "activations": self.activations.forward[number],
                    "gathered": self._gathered([self.units[0], unit, *following, *self._kept_before(number)]),
                },
            )

    def _kept_before(self, number: int) -> list[RankUnit]:
        """Units before this one that stay gathered from forward to backward."""
        first = max(1, len(self.units) - self.setup.keep)
        return list(self.units[first:number])

    def _needed_in_backward(self, last: int) -> Iterator[RankUnit]:
        """The units in the order in which backward needs them, from one block to the first.

        A recomputed block of several units needs its last unit, whose gradient comes. Then it needs all units in the
        order of forward, and then in the order of backward.
        """
        for block in range(last, 0, -1):
            units = self._blocks[block]
            if self._recomputed(block) and len(units) > 1:
                yield units[-1]
                yield from units
                yield from reversed(units[:-1])
            else:
                yield from reversed(units)

    def _recomputed(self, block: int) -> bool:
        return self.setup.checkpointing and block not in self._keeping

    def _turning(self) -> list[RankUnit]:
        """The units that are gathered while forward ends, because backward begins with them."""
        staying = {id(unit) for unit in (self.units[-1], *self._kept_before(len(self.units)))}
        needed = self._needed_in_backward(self.units[-1].block)
        return list(islice((unit for unit in needed if id(unit) not in staying), self.setup.prefetch))

    def _backward(self) -> Iterator[Moment]:
        backward = self.units[::-1]
        sizes = {flats: sum(map(self.stashed, flats)) for flats in {unit.flats for unit in backward}}
        # For each unit: the bytes of gradients at rest when its backward begins.
        stashed = list(accumulate((sizes[unit.flats] for unit in backward), initial=0))[-2::-1]
        for number in reversed(self._peak_candidates):
            others = stashed[number] + sum(self._under_way(number))
            for moment in self._backward_of(number, others):
                yield Phase.BACKWARD, moment

    def _backward_of(self, number: int, others: int) -> Iterator[dict[str, int]]:
        """The moments in the backward of one unit. ``others``: bytes of gradients of other units."""
        unit, activations = self.units[number], self.activations
        earlier = list(takewhile(lambda other: other is not unit, self._blocks[unit.block]))
        # A block is recomputed as a whole, so its units are gathered together. Each is released after its backward.
        present = [self.units[0], unit, *(earlier if self._recomputed(unit.block) else []), *self._kept_before(number)]
        coming = chain(reversed(earlier), self._needed_in_backward(unit.block - 1))
        entering = list(islice(coming, 1 + self.setup.prefetch))
        following = entering[: self.setup.prefetch]
        collected = self.width * sum(flat.whole for flat in unit.trained)
        largest = self.width * max((flat.shape.largest for flat in unit.trained), default=0)
        early = self._early_in_root()
        others += early if unit.block else 0

        # The unit computes. Its gradients wait until they are worth a deposit; from then on they have a buffer.
        gathered = self._gathered([*present, *following])
        yield {
            "activations": activations.backward[number],
            "gradients": others + (0 if unit.block else early),
            "gathered": gathered,
        }
        if unit.block:
            yield {
                "activations": activations.depositing[number],
                "gradients": others + collected,
                "gathered": gathered,
            }
        else:
            # The last gradients of the root have arrived and are copied into the buffer.
            yield {
                "activations": activations.after_backward[number],
                "gradients": others + collected,
                "temporary": min(collected, DEPOSIT_BYTES + largest),
                "gathered": gathered,
            }
        # The next unit begins before this unit ends.
        yield {
            "activations": activations.after_backward[number],
            "gradients": others + collected,
            "gathered": self._gathered([*present, *entering]),
        }

    def _under_way(self, number: int) -> tuple[int, int]:
        """When the backward of a unit begins: bytes of gradients in reduces, and in copies to the host."""
        in_flight = IN_FLIGHT - 1 if self.setup.world > 1 else 0
        divided = self.table.gradients.extent is Extent.SHARD
        latest = (flat for unit in islice(self.units, number + 1, None) for flat in reversed(unit.trained))
        flying = sum(
            # The result of a reduce is new memory. On the device it is the stash, which is counted already.
            self.width * (flat.whole + (flat.own if divided and flat.on_host else 0))
            for flat in islice(latest, in_flight)
            if divided or self.accumulates or flat.on_host  # otherwise the reduced gradient stays in its buffer
        )
        if self.setup.offload is None:
            return flying, 0
        landing = islice((flat for flat in latest if flat.on_host), LANDING)
        return flying, sum(self.width * (flat.own if divided else flat.whole) for flat in landing)

    def _early_in_root(self) -> int:
        """Bytes of the root's gradients that arrive before those of the blocks, or of the root's whole buffer."""
        early = self.activations.early_root_gradients
        whole = self.width * sum(flat.whole for flat in self.units[0].trained)
        return whole if early >= DEPOSIT_BYTES else early

    def _update(self) -> Iterator[Moment]:
        """The optimizer runs on batches of flats. A batch needs its gradients in fp32 and one temporary of Adam."""
        widened = 0 if self.accumulates else self.setup.master_width
        temporary = self.setup.moment_width if self.setup.moments > 1 else 0
        batches = list(self._batches())
        for number, elements in enumerate(batches or [0]):
            first = self._gathered_early if number else []
            yield (
                Phase.UPDATE,
                {
                    "gradients": self._all_stashed,
                    "temporary": elements * (widened + temporary),
                    "gathered": self._gathered(first),
                },
            )

    def _batches(self) -> Iterator[int]:
        """The elements of each batch that the optimizer updates on the device."""
        elements, enough = 0, FIRST_ELEMENTS
        for flat in (flat for unit in self.units for flat in unit.flats):
            if flat.shape.trained and not flat.on_host:
                elements += flat.own
                if elements >= enough:
                    yield elements
                    elements, enough = 0, UPDATE_ELEMENTS
        if elements:
            yield elements

    def _gathered(self, units: Sequence[RankUnit]) -> int:
        if not self.sharded:
            return 0
        distinct = {id(unit): unit for unit in units}.values()
        return self.width * sum(unit.whole for unit in distinct)
