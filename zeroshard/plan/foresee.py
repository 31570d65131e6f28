"""Answers for ``shard()``: does this setting fit, and which stage and offload are best here.

The module alone shows model states, gathered units and the buffers of the update. Activations and times are known only
if the user gives an example input. Every message says what was not counted.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn

from ..config.bounds import FRAGMENTS
from ..config.offload import Offload, OffloadChoice
from ..config.options import Config
from ..offload.library import Simd
from ..offload.library import choose as choose_kernel
from ..offload.place import DEVICE_SHARE
from ..recompute.choice import Sizes, fragments, said, sizes_of
from ..system.sizes import size_text
from .advice import Row, Variant, change, recommend, variants, with_fewest_recomputed
from .candidates import SAVES_MEMORY, more_allowed, offloads, title, used
from .command import shard_options
from .machine.hardware import Hardware, profile_of
from .memory.device_memory import KIND_TITLES, DeviceMemory
from .memory.model_states import STATES_SHARE
from .model.module import examine, first_values, has_kernel, setup_of
from .model.trace import Trace
from .model.tracer import samples_of, tokens_of
from .room import Room

SPARE = 0.05
"""The part of the host's memory that an offload leaves free, and of the device's if "auto" fills it with states. A plan
is not exact, and a process needs more on the host than states."""
SUGGESTED = 3
"""The largest number of settings that a message suggests."""


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
    problem: str | None = None
    """Why "auto" has nothing to choose. ``shard()`` raises it."""
    decision: Decision | None = None


class Foresight:
    """The plan for one module on the machine where it is about to run."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, shards: int, room: Room
    ) -> None:
        self.config, self.shards, self.room = config, shards, room
        self._setup = replace(
            setup_of(model, optimizer, config, shards),
            first_values=first_values(model, config, "cpu" if room.on_cpu else "cuda"),
        )
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

    def expect(self, micro_batches: int) -> None:
        """From now on a step has so many micro-batches."""
        self._setup = replace(self._setup, micro_batches=micro_batches)

    def row(self, stage: int, variant: Variant) -> Row:
        """The plan of one stage and offload."""
        setup = replace(self._setup, stage=stage, offload=variant.offload)
        row = Row(variant, self._model, setup, self.hardware)
        if isinstance(self._model, Trace) or not row.traced.blocks:
            return row
        # The plan is not exact, so as after a measured step one block more than are kept must fit.
        none = replace(row, setup=replace(setup, checkpointing=False, activations=None))
        spare = max(0.0, row.room - none.room) / row.traced.blocks
        spare += (fragments(not self.room.on_cpu) - FRAGMENTS) * self.room.device
        return with_fewest_recomputed(row, lambda other: self.fits(other) and other.room >= spare)

    def fits(self, row: Row) -> bool:
        """True if the row fits, with some host memory to spare.

        If activations are not counted, model states must also leave room for them.
        """
        spare = 0 if self.room.on_cpu or row.setup.offload is None else SPARE * self.room.host
        return row.fits and row.host_room >= spare and self._leaves_room(row, STATES_SHARE)

    def _may_fit(self, row: Row) -> bool:
        """False if it is certain that memory runs out: by the whole plan, or by model states and buffers alone."""
        if self.counts_activations:
            return row.fits
        certain = row.budget.at_step.model_states + row.budget.at_step.buffers
        return certain <= self.hardware.usable_device_memory and row.host_room >= 0

    def _leaves_room(self, row: Row, share: float) -> bool:
        return self.counts_activations or row.budget.at_step.model_states <= share * self.room.device

    # -- what was asked for ---------------------------------------------------------------------------------------

    def advise(self) -> Advice:
        """Decides what is "auto", and warns of what does not fit."""
        config = self.config
        if config.stage != "auto" and not config.chooses_offload:
            row = self.row(config.stage, Variant(name_of(config.offload), config.offload))
            warning = None if row.fits else self.refusal(row)
            return Advice(cast(Any, config.stage), config.offload, warning=warning, decision=self._decision(row))
        rows = list(self._candidates(config.choice, config.stage))
        best = recommend([row for row in rows if self.fits(row)])
        taken = best or max(rows, key=lambda row: (self._may_fit(row), row.fits, *_nearness(row)))
        stage, offload = cast(Any, taken.setup.stage), taken.setup.offload
        if not self._may_fit(taken):
            return Advice(stage, offload, problem=self.problem(taken))
        warning = None if taken.fits else self.refusal(taken)
        reason = self._reason(taken, best is not None, rows)
        return Advice(stage, offload, reason, warning, decision=self._decision(taken))

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

    def _candidates(self, choice: OffloadChoice | None, asked: int | str) -> Iterator[Row]:
        """The settings that "auto" may choose. By default none changes results or restricts the training loop."""
        for stage in range(4) if isinstance(asked, str) else [asked]:
            for variant in self._ways(stage, choice) if choice is not None else [_given(self.config.offload)]:
                if (asked == stage or self._worthwhile(stage, variant)) and self._allowed(stage, variant):
                    row = self.row(stage, variant)
                    yield row
                    yield from self._partial(row) if choice is not None else ()

    def _partial(self, row: Row) -> Iterator[Row]:
        """The same setting with as many states on the device as there is room for, if there is room for some."""
        offload = row.setup.offload
        if offload is None or offload.parameters == "cpu" or offload.delayed_update_after is not None:
            return

        def on_host(percent: int) -> Row:
            less = replace(offload, host_fraction=percent / 100)
            return self.row(row.setup.stage, Variant(title(less), less))

        def has_room(found: Row) -> bool:
            free = found.room >= SPARE * self.room.device and self._leaves_room(found, DEVICE_SHARE)
            return free and found.recomputed <= row.recomputed  # to recompute a block takes longer

        if not has_room(row):
            return
        less = on_host(bisect_left(range(1, 100), True, key=lambda percent: has_room(on_host(percent))) + 1)
        if less.budget.host.total < row.budget.host.total:
            yield less

    def _worthwhile(self, stage: int, variant: Variant) -> bool:
        """True if the offload is useful in this stage: first divide, then offload (ZeRO-Offload, 4.2).

        Without dividing, all ranks would store the same states on the host.
        """
        if variant.offload is None:
            return True
        return stage >= 2 if self.shards > 1 else stage == 0 or variant.offload.parameters == "cpu"

    def _ways(self, stage: int, choice: OffloadChoice) -> Iterator[Variant]:
        yield Variant("none", None)
        if not self.room.on_cpu and self._offloads:
            native = choose_kernel().simd is not Simd.TORCH
            yield from offloads(choice, stage, native=native, halves=self._setup.precision == "bf16")

    def _allowed(self, stage: int, variant: Variant) -> bool:
        """True if the other options allow this stage and offload."""
        try:
            replace(self.config, stage=stage, offload=variant.offload)
        except ValueError:
            return False
        return variant.offload is None or self._setup.master_width > 0 or self._setup.precision == "fp32"

    def fitting(self) -> list[Row]:
        """Settings that would fit; those that change least come first. Unusual ones only if no other fits."""
        usual = [
            self.row(stage, way)
            for stage in range(4)
            for way in (variants(stage, self._setup, self.hardware) if self._offloads else [Variant("none", None)])
            if self._worthwhile(stage, way) and self._allowed(stage, way)
        ]
        found = [row for row in usual if self.fits(row)] or [row for row in self._everything() if self.fits(row)]
        return sorted(found, key=change)

    def _everything(self) -> Iterator[Row]:
        """All settings that save memory, whatever they change."""
        limits = OffloadChoice() if self.config.choice is None else self.config.choice
        return self._candidates(replace(limits, allow=SAVES_MEMORY), "auto")

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
        lacks = ", and ".join(self._lacks(row, by_kind(row.budget.peak)))
        told = f"stage {row.setup.stage}, offload {row.variant.name} will not fit: a rank needs {lacks}."
        return f"{told} {self.counted()} {self._remedy()}"

    def _lacks(self, row: Row, kinds: str = "") -> Iterator[str]:
        """What a row needs and does not get."""
        needs, place = row.budget, "memory" if self.room.on_cpu else "device memory"
        if row.room < 0:
            least = f"at least {size_text(needs.peak.total)} of {place} in {needs.phase.value}"
            yield f"{least}{f' ({kinds})' if kinds else ''}, and {size_text(self.room.device)} are there"
        if row.host_room < 0:
            pinned = f" ({size_text(needs.host.pinned)} of it pinned)" if kinds else ""
            there = f"{size_text(self.room.host)} are there for it"
            yield f"{size_text(needs.host.total)} of host memory{pinned}, and {there}"

    def problem(self, nearest: Row) -> str:
        """Says that nothing that "auto" may choose fits, and which call would fit."""
        lacks = ", and ".join(self._lacks(nearest, by_kind(nearest.budget.peak)))
        told = (
            f'nothing that "auto" may choose fits here. Nearest comes stage {nearest.setup.stage}, offload '
            f"{nearest.variant.name}, but a rank then needs {lacks}. {self.counted()}"
        )
        return f"{told} {self._remedy()}"

    def _remedy(self) -> str:
        """The call with more allowances that would fit, if "auto" was asked for. Otherwise settings that would fit."""
        for choice in more_allowed(self.config.choice) if self.config.choice is not None else ():
            best = recommend([row for row in self._candidates(choice, self.config.stage) if self.fits(row)])
            if best is not None:
                setting = f"stage {best.setup.stage}, offload {best.variant.name}: {_size(best)}"
                return f"This would fit: {choice} ({setting}). It changes results, or what the training loop may do."
        return self.suggestion(self.fitting())

    def suggestion(self, rows: Sequence[Row]) -> str:
        """Names the first rows that fit."""
        if not rows:
            more = "more ranks, a smaller batch"
            if not self._setup.checkpointing:
                more += ", or recomputed blocks (activations=zeroshard.Activations())"
            least = max(self._everything(), key=_nearness)
            named = f"{', '.join(shard_options(least.setup))} ({_size(least)})"
            nearest = "" if self.fits(least) else f" Nearest comes {named}."
            return f"No stage or offload would fit on {self.shards} rank(s); it takes {more}.{nearest}"
        named = "; ".join(f"{', '.join(shard_options(row.setup))} ({_size(row)})" for row in rows[:SUGGESTED])
        return f"What would fit: {named}."

    def counted(self) -> str:
        """Says what is counted in the numbers, and what is not."""
        states = "model states, gathered units and buffers"
        if self.counts_activations:
            return f"Counted: {states}, and the activations of one micro-batch."
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
        plain = [row for row in rows if row is taken or _is_plain(row)]
        sizes = ", ".join(
            f"{_name(row, self.config)}: {size_text(row.budget.peak.total)}{'' if self.fits(row) else ' (too much)'}"
            for row in plain
        )
        room = f"{size_text(self.room.device)}{share}"
        told = f"zeroshard: {name} chosen, {verdict}: one rank at its peak ({sizes}) of {room}"
        if taken.budget.host.total:
            told += f"; {size_text(taken.budget.host.total)} of {size_text(self.room.host)} on the host"
        told += "".join(f". {reason}" for reason in self._reasons(taken))
        return f"{told}. {self.counted()}" + ("" if fits or not taken.fits else f" {self._remedy()}")

    def _reasons(self, taken: Row) -> Iterator[str]:
        """For each allowance that was used: why."""
        if taken.setup.offload is None or not self.config.chooses_offload:
            return
        for use in used(taken.setup.offload):
            other = self.row(taken.setup.stage, Variant(title(use.milder), use.milder))
            lacks = list(self._lacks(other))
            if lacks:
                why = f"a rank needs {', and '.join(lacks)}"
            elif self.fits(other) and other.time is not None and taken.time is not None:
                why = f"a step takes {other.time.total:.3g} s and not {taken.time.total:.3g} s"
            else:
                why = "too little memory is left for all else"
            yield f"Used as allowed: {use.name}, because {use.instead} {why}"


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


def _is_plain(row: Row) -> bool:
    """True for no offload, and for an offload of all states that changes nothing else."""
    offload = row.setup.offload
    return offload is None or replace(offload, threads=None, host_memory=None, seed=0) in (
        Offload(),
        Offload(parameters="cpu"),
    )


def _nearness(row: Row) -> tuple[float, float]:
    """A key to sort by: bytes that are lacking on device and host together, then the bytes that stay free."""
    return min(0, row.room) + min(0, row.host_room), min(row.room, row.host_room)
