"""Answers for ``shard()``: does this setting fit, and which stage and offload are best here.

The module alone shows model states, gathered units and the buffers of the update. Activations and times are known only
if the user gives an example input. Every message says what was not counted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn

from ..comm.parallel import local
from ..config.offload import Offload
from ..config.options import Config
from ..offload.library import Simd
from ..offload.library import choose as choose_kernel
from ..recompute.choice import Sizes, said, sizes_of
from ..system import machine as facts
from ..system.sizes import size_text
from .advice import Row, Variant, recommend, variants, with_fewest_recomputed
from .command import shard_options
from .machine.hardware import Hardware, profile_of
from .memory.device_memory import KIND_TITLES, DeviceMemory
from .memory.model_states import STATES_SHARE
from .model.module import examine, has_kernel, setup_of
from .model.trace import Trace
from .model.tracer import samples_of, tokens_of

SUGGESTED = 3
"""The largest number of settings that a message suggests."""


class Room(NamedTuple):
    """Memory that a rank may use, in bytes."""

    device: int
    host: int
    local_ranks: int = 1
    """Ranks that share the host."""
    title: str = ""
    """The device's own name."""
    on_cpu: bool = False
    """True if ranks compute in host memory."""


def room_of(model: nn.Module, device: torch.device, local_ranks: int) -> Room:
    """The room of this rank. Parameters that are already on the device will move, so their memory counts as free."""
    title = facts.device_title(device)
    if device.type != "cuda":
        share = facts.usable_memory() // local_ranks
        return Room(share, share, local_ranks, title, on_cpu=True)
    movable = sum(local(parameter).nbytes for parameter in model.parameters() if parameter.device == device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0]
    return Room(free + cached + movable, facts.available_memory() // local_ranks, local_ranks, title)


def least(rooms: Sequence[Room]) -> Room:
    """The room that every rank has: the minimum of all rooms."""
    first = rooms[0]
    device, host = min(room.device for room in rooms), min(room.host for room in rooms)
    return Room(device, host, first.local_ranks, first.title, first.on_cpu)


class Decision(NamedTuple):
    """How many blocks to recompute, with ``Activations(recompute="auto")``."""

    recomputed: int
    sizes: Sizes
    """Of the inputs in the example that it is decided for."""
    reason: str


@dataclass(frozen=True)
class Advice:
    """The settings that ``shard()`` takes, and the messages it prints."""

    stage: Literal[0, 1, 2, 3]
    offload: Offload | None
    chosen: str | None = None
    """The reason, if "auto" was to be decided."""
    warning: str | None = None
    """What does not fit, if something does not."""
    decision: Decision | None = None


class Foresight:
    """The plan for one module on the machine where it is about to run."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, shards: int, room: Room
    ) -> None:
        self.config, self.shards, self.room = config, shards, room
        self._setup = setup_of(model, optimizer, config, shards)
        self._model, self.activations = examine(model, config, self._setup)
        if self.counts_activations:
            recomputes = self._model.recomputes if isinstance(self._model, Trace) else True
            self._setup = replace(self._setup, checkpointing=recomputes, activations=config.activations)
            batch, sequence = tokens_of(config.example)
            self._setup = replace(self._setup, batch=batch or samples_of(config.example), sequence=sequence or 1)
        self._offloads = optimizer is None or has_kernel(optimizer)
        profile, _ = profile_of(room.title, room.device, room.on_cpu)
        if profile is not None:
            profile = replace(profile, devices_per_node=room.local_ranks)
        nodes = max(1, shards // room.local_ranks)
        self.hardware = Hardware(
            shards - shards % nodes, nodes, room.device, room.host * room.local_ranks, profile, False, room.on_cpu, 0.0
        )

    @property
    def counts_activations(self) -> bool:
        return self.activations is None

    def row(self, stage: int, variant: Variant) -> Row:
        """The plan of one stage and offload."""
        setup = replace(self._setup, stage=stage, offload=variant.offload)
        row = Row(variant, self._model, setup, self.hardware)
        if isinstance(self._model, Trace):
            return row
        # The plan is not exact, so as after a measured step one block more than are kept must fit.
        none = replace(row, setup=replace(setup, checkpointing=False, activations=None))
        spare = max(0.0, row.room - none.room) / row.traced.blocks
        return with_fewest_recomputed(row, lambda other: self.fits(other) and other.room >= spare)

    def fits(self, row: Row) -> bool:
        """True if the row fits. If activations are not counted, model states must also leave room for them."""
        share = 1.0 if self.counts_activations else STATES_SHARE
        return row.fits and row.budget.at_step.model_states <= share * self.room.device

    # -- what was asked for ---------------------------------------------------------------------------------------

    def advise(self) -> Advice:
        """Decides what is "auto", and warns of what does not fit."""
        config = self.config
        if config.stage != "auto" and not config.chooses_offload:
            row = self.row(config.stage, Variant(name_of(config.offload), config.offload))
            warning = None if row.fits else self.refusal(row)
            return Advice(cast(Any, config.stage), config.offload, warning=warning, decision=self._decision(row))
        rows = list(self._candidates())
        best = recommend([row for row in rows if self.fits(row)])
        taken = best or max(rows, key=_shortest_room)
        warning = None if taken.fits else self.refusal(taken)
        reason = self._reason(taken, best is not None, rows)
        return Advice(cast(Any, taken.setup.stage), taken.setup.offload, reason, warning, self._decision(taken))

    def _decision(self, row: Row) -> Decision | None:
        """What the plan decides of ``recompute="auto"``. None without an example, and where states fill the device."""
        offload = row.setup.offload
        fills = offload is not None and offload.host_fraction == "auto" and offload.device_memory is None
        if isinstance(self._model, Trace) or fills:
            return None
        every = replace(row, setup=replace(row.setup, checkpointing=True, activations=self.config.activations))
        taken = row.budget.peak.total - every.budget.peak.total
        reason = said(row.recomputed, row.traced.blocks, max(0, taken), max(0.0, every.room))
        return Decision(row.recomputed, sizes_of(self.config.example), f"{reason}, by the plan")

    def _candidates(self) -> Iterator[Row]:
        """The settings that "auto" may choose. None of them changes results or restricts the training loop."""
        config = self.config
        stages = range(4) if config.stage == "auto" else [config.stage]
        for stage in stages:
            for variant in self._ways(stage) if config.chooses_offload else [_given(config.offload)]:
                given = config.stage != "auto"
                if (given or self._worthwhile(stage, variant)) and self._allowed(stage, variant):
                    yield self.row(stage, variant)

    def _worthwhile(self, stage: int, variant: Variant) -> bool:
        """True if the offload is useful in this stage: first divide, then offload (ZeRO-Offload, 4.2).

        Without dividing, all ranks would store the same states on the host.
        """
        if variant.offload is None:
            return True
        return stage >= 2 if self.shards > 1 else stage == 0 or variant.offload.parameters == "cpu"

    def _ways(self, stage: int) -> Iterator[Variant]:
        yield Variant("none", None)
        if self.room.on_cpu or not self._offloads:
            return
        yield Variant("cpu", Offload())
        if choose_kernel().simd is not Simd.TORCH:
            yield Variant("cpu, split master", Offload(split_master=True))
        if stage == 3:
            yield Variant("cpu, parameters too", Offload(parameters="cpu"))

    def _allowed(self, stage: int, variant: Variant) -> bool:
        """True if the other options allow this stage and offload."""
        try:
            replace(self.config, stage=stage, offload=variant.offload)
        except ValueError:
            return False
        return variant.offload is None or self._setup.master_width > 0 or self._setup.precision == "fp32"

    def fitting(self) -> list[Row]:
        """Settings that would fit; those that change least come first."""
        rows = []
        for stage in range(4):
            ways = variants(stage, self._setup, self.hardware) if self._offloads else [Variant("none", None)]
            rows += [self.row(stage, way) for way in ways if self._worthwhile(stage, way) and self._allowed(stage, way)]
        return sorted((row for row in rows if self.fits(row)), key=_change)

    def instead(self, stage: int, offload: Offload | None, capacity: int | None, other: int) -> str:
        """Suggests settings that fit, after memory has run out in one.

        ``capacity``: bytes of the device that can be used in all. ``other``: bytes in use that were no model states.
        """
        there, now = self.row(stage, _given(offload)), copy.copy(self)
        if capacity is not None:
            states = capacity - (0 if self.counts_activations else other)
            now.room = Room(max(0, states), self.room.host, self.room.local_ranks, self.room.title, self.room.on_cpu)
            now.hardware = replace(self.hardware, device_memory=now.room.device)
            now.activations = None
        rows = [row for row in now.fitting() if row.budget.peak.total < there.budget.peak.total]
        told = now.suggestion(rows)
        if capacity is not None and not self.counts_activations:
            told += f" This counts {size_text(other)} that are no model states; the run may have needed more of these."
        return told

    # -- what is said ---------------------------------------------------------------------------------------------

    def refusal(self, row: Row) -> str:
        """Says why a row cannot fit, with sizes by kind, and what would fit."""
        lacks, needs = [], row.budget
        if row.room < 0:
            lacks.append(
                f"at least {size_text(needs.peak.total)} of {'memory' if self.room.on_cpu else 'device memory'} in "
                f"{needs.phase.value} ({by_kind(needs.peak)}), and {size_text(self.room.device)} are there"
            )
        if row.host_room < 0:
            lacks.append(
                f"{size_text(needs.host.total)} of host memory ({size_text(needs.host.pinned)} of it pinned), and "
                f"{size_text(self.room.host)} are there for it"
            )
        return (
            f"stage {row.setup.stage}, offload {row.variant.name} will not fit: a rank needs {', and '.join(lacks)}. "
            f"{self.counted()} {self.suggestion(self.fitting())}"
        )

    def suggestion(self, rows: Sequence[Row]) -> str:
        """Names the first rows that fit."""
        if not rows:
            more = "more ranks, a smaller batch or activation checkpointing"
            return f"No stage or offload would fit on {self.shards} rank(s); it takes {more}."
        named = "; ".join(f"{', '.join(shard_options(row.setup))} ({_size(row)})" for row in rows[:SUGGESTED])
        return f"What would fit: {named}."

    def counted(self) -> str:
        """Says what is counted in the numbers, and what is not."""
        states = "model states, gathered units and buffers"
        if self.counts_activations:
            return f"Counted: {states}, and activations by example=."
        return f"Counted: {states}; not activations, {self.activations}."

    def _reason(self, taken: Row, fits: bool, rows: Sequence[Row]) -> str:
        stages = {row.setup.stage for row in rows}
        name = f"stage {taken.setup.stage}"
        if self.config.chooses_offload:
            name += f", offload {taken.variant.name}"
        if not fits:
            verdict = "and even that may not fit"
        elif taken.time is not None:
            machine = self.hardware.machine
            assert machine is not None
            verdict = f"the fastest that fits ({taken.time.total:.3g} s a step as on {machine.title})"
        else:
            verdict = "which changes least of those that fit"
            if not self.config.chooses_offload and len(stages) > 1:
                verdict = "the lowest that fits"
        share = "" if self.counts_activations else f", {STATES_SHARE:.0%} of it for model states"
        sizes = ", ".join(
            f"{_name(row, self.config)}: {size_text(row.budget.peak.total)}{'' if self.fits(row) else ' (too much)'}"
            for row in rows
        )
        room = f"{size_text(self.room.device)}{share}"
        told = f"zeroshard: {name} chosen, {verdict}: one rank at its peak ({sizes}) of {room}"
        if taken.budget.host.total:
            told += f"; {size_text(taken.budget.host.total)} of {size_text(self.room.host)} on the host"
        return f"{told}. {self.counted()}" + ("" if fits or not taken.fits else f" {self.suggestion(self.fitting())}")


# -- words --------------------------------------------------------------------------------------------------------


def by_kind(memory: DeviceMemory) -> str:
    """The sizes of all kinds that are not 0, as text."""
    sizes = {title: getattr(memory, kind) for kind, title in KIND_TITLES.items()}
    return ", ".join(f"{title} {size_text(size)}" for title, size in sizes.items() if size)


def name_of(offload: Offload | None) -> str:
    """A short name of an offload, for titles."""
    if offload is None:
        return "none"
    return "cpu" if offload == Offload() else "cpu, with options"


def _given(offload: Offload | None) -> Variant:
    return Variant(name_of(offload), offload)


def _name(row: Row, config: Config) -> str:
    stage = f"stage {row.setup.stage}"
    return f"{stage} {row.variant.name}" if config.chooses_offload else stage


def _size(row: Row) -> str:
    host = row.budget.host.total
    return f"{size_text(row.budget.peak.total)}" + (f", {size_text(host)} on the host" if host else "")


def _shortest_room(row: Row) -> float:
    return min(row.room, row.host_room)


def _change(row: Row) -> tuple[bool, bool, int]:
    offload = row.setup.offload
    exact = offload is None or (offload.moments is torch.float32 and not offload.update_in_backward)
    return offload is not None, not exact, row.setup.stage
