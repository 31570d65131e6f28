"""Advice that follows from a run's numbers: one function for each rule, from numbers to a sentence and a setting.

A rule says nothing unless the run shows the cause, and its sentence has the numbers. What a setting would bring is told
only where the numbers say it. Rules that need a trace are silent without one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .journal import PlanRow
from .summary import Summary, seconds_text, size_text
from .timeline import DOWN, GATHER, OTHER, REDUCE, UP, UPDATE, Window

WORTH_SAYING = 0.05
"""A wait that takes less of a step is not worth a change."""
MUCH = 0.15
"""From this share on, time in which nothing that zeroshard knows of ran is told."""
SHOWN_HIDING = 0.1
"""If less of the host's update than this share is hidden, the run does not show which batch would hide it all."""
FULL = 0.92
"""A plan may fill this share of a device, beside what the plan does not count."""

SMALLER_SHARE = "A larger micro-batch moves no more, so the wait becomes a smaller share of a step."


class Advice(NamedTuple):
    """One piece of advice."""

    sentence: str
    """What the run shows, with the numbers."""
    setting: str = ""
    """What to change, as code; nothing if no setting of zeroshard changes it."""


def advice_for(summary: Summary) -> list[Advice]:
    """All advice for a run, what costs most first."""
    found = [(weight, advice) for rule in RULES for weight, advice in rule(summary)]
    return [advice for _, advice in sorted(found, key=lambda each: -each[0])]


Found = Iterator[tuple[float, Advice]]
"""Advice, each with the share of a step that it is about. Broken runs come first, with more than 1."""


def not_finite(summary: Summary) -> Found:
    """A loss that is NaN or infinite."""
    first = summary.first_bad_loss
    if first is None:
        return
    more = f", and {summary.bad_losses} in all" if summary.bad_losses > 1 else ""
    sentence = f"The loss is not finite at step {first.step:,}{more}."
    if summary.run.head.get("on_nonfinite") is None:
        yield 2.0, Advice(f"{sentence} To stop there, and to have the unit named that made it:", 'on_nonfinite="stop"')
    else:
        yield 2.0, Advice(sentence)


def host_update(summary: Summary) -> Found:
    """The device waits for the update on the host."""
    window, offload = summary.window, _offload(summary)
    if window is None or offload is None:
        return
    waits, busy = _wait(window, UPDATE), window.busy(UPDATE)
    if waits < WORTH_SAYING * window.seconds:
        return
    ways, sentence = [], f"{_of(waits, window)} waits for the host update"
    hidden = busy - waits
    if hidden >= SHOWN_HIDING * busy:  # computing hides a part, and grows with the batch
        batch, more = summary.run.number("batch"), busy / hidden
        larger = (
            f"a batch of {math.ceil(batch * more)}" if batch and 1 <= batch < 1e9 else f"{more:.1f} times the batch"
        )
        ways.append(f"{larger} hides it, if computing grows with the batch")
    setting = []
    if offload.get("moments", "float32") == "float32":
        ways.append("moments in bf16 give the host 8 bytes less to move for each parameter")
        setting.append("moments=torch.bfloat16")
    undelayed = offload.get("delayed_update_after") is None and offload.get("host_fraction", 1.0) == 1.0
    if undelayed and not offload.get("update_in_backward") and not offload.get("read_back"):  # as `Offload` allows
        computing = window.seconds - sum(wait.stop - wait.start for wait in window.waits)
        if computing >= busy:
            ways.append(
                f"the delayed update hides {seconds_text(busy)} behind {seconds_text(computing)} of computing, and "
                "changes results"
            )
            setting.append("delayed_update_after=40")
    told = f"{sentence}: {'; or '.join(ways)}." if ways else f"{sentence}."
    yield waits / window.seconds, Advice(told, ", or ".join(f"offload=zeroshard.Offload({each})" for each in setting))


def copies(summary: Summary) -> Found:
    """The device waits for copies between host and device."""
    window = summary.window
    if window is None:
        return
    waits = {lane: _wait(window, lane) for lane in (DOWN, UP)}
    share = sum(waits.values()) / window.seconds
    if share < WORTH_SAYING:
        return
    sides = [f"{seconds_text(waits[DOWN])} to the host", f"{seconds_text(waits[UP])} to the device"]
    sentence = f"{_of(sum(waits.values()), window)} waits for copies between host and device ({', '.join(sides)})"
    memory, offload = summary.memory, _offload(summary)
    free = None
    if memory is not None and memory.peak is not None and memory.capacity is not None:
        free = FULL * memory.capacity - memory.peak
    whole = offload is not None and offload.get("host_fraction", 1.0) == 1.0
    delayed = offload is not None and offload.get("delayed_update_after") is not None
    on_device = offload is not None and offload.get("parameters", "device") == "device"
    if free is not None and free > 0 and whole and on_device and not delayed:  # as `Offload` allows
        told = f"{sentence}, and {size_text(free)} of the device are free for a part of the states."
        yield share, Advice(told, 'offload=zeroshard.Offload(host_fraction="auto")')
        return
    yield share, Advice(f"{sentence}. {SMALLER_SHARE}")


def gathers(summary: Summary) -> Found:
    """The device waits for parameters of other ranks."""
    window, stage = summary.window, summary.stage
    if window is None or _wait(window, GATHER) < WORTH_SAYING * window.seconds:
        return
    waits, times = _wait(window, GATHER), summary.run.number("micro_batches") or 1
    sentence = f"{_of(waits, window)} waits for parameters of other ranks"
    lower = _row(summary, 2) if stage == 3 else None
    if lower is not None and _fits_surely(summary, lower):
        yield (
            waits / window.seconds,
            Advice(
                f"{sentence}. Stage 2 gathers once a step, not twice, and needs {_need(summary, lower)} a rank by the "
                "plan.",
                "stage=2",
            ),
        )
    elif stage == 3 and times > 1:
        told = f"{sentence}, and each of the {times:g} micro-batches of a step gathers them anew."
        yield waits / window.seconds, Advice(f"{told} Fewer and larger micro-batches wait less.")
    else:
        yield waits / window.seconds, Advice(f"{sentence}. {SMALLER_SHARE}")


def reduces(summary: Summary) -> Found:
    """The device waits for gradients to be reduced."""
    window = summary.window
    if window is None or _wait(window, REDUCE) < WORTH_SAYING * window.seconds:
        return
    waits, times = _wait(window, REDUCE), summary.run.number("micro_batches") or 1
    sentence = f"{_of(waits, window)} waits for gradients to be reduced"
    if times > 1:
        yield (
            waits / window.seconds,
            Advice(
                f"{sentence}, and each of the {times:g} micro-batches of a step reduces its own. Only the last needs "
                "to, where there is memory for whole gradients.",
                "with zeroshard.no_sync(model): ...",
            ),
        )
    else:
        yield waits / window.seconds, Advice(f"{sentence}. {SMALLER_SHARE}")


def nothing_ran(summary: Summary) -> Found:
    """Time in which neither the device nor a lane did anything."""
    window = summary.window
    if window is None or _wait(window, OTHER) < MUCH * window.seconds:
        return
    waits = _wait(window, OTHER)
    yield (
        waits / window.seconds,
        Advice(
            f"In {_of(waits, window)} no lane did anything: the loop itself, its data, or another rank that came "
            "later. Of the usual causes, data that is loaded in the training process is the first to look at."
        ),
    )


def offload_not_needed(summary: Summary) -> Found:
    """States are offloaded although the plan says that they fit on the device."""
    offload, window = _offload(summary), summary.window
    if offload is None or window is None:
        return
    waits = sum(_wait(window, lane) for lane in (DOWN, UPDATE, UP))
    row = next((row for row in _rows(summary) if row.offload == "none" and row.stage == summary.stage), None)
    if waits >= WORTH_SAYING * window.seconds and row is not None and _fits_surely(summary, row):
        yield (
            waits / window.seconds,
            Advice(
                f"{_of(waits, window)} waits for the host or for copies. Without offload a rank needs "
                f"{_need(summary, row)} by the plan, and {size_text(_capacity(summary) or 0)} are there.",
                "offload=None",
            ),
        )


def short_of_memory(summary: Summary) -> Found:
    """The peak is close to what the device has."""
    memory = summary.memory
    if memory is None or memory.peak is None or not memory.capacity or memory.peak < FULL * memory.capacity:
        return
    sentence = f"The peak is {size_text(memory.peak)} of {size_text(memory.capacity)} on the device."
    higher = None if summary.stage is None else _row(summary, summary.stage + 1)
    own = summary.planned
    saved = 0.0 if higher is None or own is None else sum(own.peak.values()) - sum(higher.peak.values())
    if higher is not None and saved >= WORTH_SAYING * memory.capacity:
        told = f"{sentence} Stage {higher.stage} takes {size_text(saved)} less of a rank, by the plan."
        yield 0.5, Advice(told, f"stage={higher.stage}")
    else:
        yield 0.5, Advice(sentence)


RULES: tuple[Callable[[Summary], Found], ...] = (
    not_finite,
    host_update,
    offload_not_needed,
    copies,
    gathers,
    reduces,
    nothing_ran,
    short_of_memory,
)


def _wait(window: Window, cause: str) -> float:
    return sum(wait.stop - wait.start for wait in window.waits if wait.cause == cause)


def _of(seconds: float, window: Window) -> str:
    return f"{seconds_text(seconds)} of {seconds_text(window.seconds)}"


def _offload(summary: Summary) -> dict[str, Any] | None:
    """The options of the offload that differ from their defaults; None without offload."""
    offload = summary.run.head.get("offload")
    return offload if isinstance(offload, dict) else None


def _rows(summary: Summary) -> list[PlanRow]:
    return [] if summary.run.plan is None else summary.run.plan.rows


def _row(summary: Summary, stage: int) -> PlanRow | None:
    """The plan of another stage with the same offload."""
    own = summary.planned
    return next((row for row in _rows(summary) if own and row.stage == stage and row.offload == own.offload), None)


def _capacity(summary: Summary) -> float | None:
    return None if summary.memory is None else summary.memory.capacity


def _fits_surely(summary: Summary, row: PlanRow) -> bool:
    """Whether a row fits, with its activations: planned ones, or as many as the run had beside its own plan."""
    capacity = _capacity(summary)
    return row.fits and capacity is not None and _whole(summary, row) <= FULL * capacity


def _whole(summary: Summary, row: PlanRow) -> float:
    memory, own = summary.memory, summary.planned
    planned = sum(row.peak.values())
    if memory is None or memory.peak is None or own is None:
        return math.inf
    return planned + max(0.0, memory.peak - sum(own.peak.values()))


def _need(summary: Summary, row: PlanRow) -> str:
    return size_text(_whole(summary, row))
