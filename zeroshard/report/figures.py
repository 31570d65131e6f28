"""The charts of a report as data: what each shows, in one sentence, and the same values as a table.

A chart is a dictionary that ``page.js`` draws, by its "type": "lines", "bars" or "lanes". A table is a header and rows
of text. Both come from the same numbers, in one place, so that they cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .journal import Evaluation, PlanRow, Step
from .summary import Entry, Summary, number_text, seconds_text, size_text, speed_of, thinned
from .timeline import DOWN, GATHER, LANES, OTHER, PARTS, REDUCE, TITLES, UP, UPDATE, Window

MOST_POINTS = 1200
"""Points of a line. A longer run shows means of steps that follow each other."""
TABLE_ROWS = 40
"""Rows of a table of steps."""
LARGEST = 1e300
"""Larger numbers are drawn as nothing: sums of them are infinite."""
MOST_BOXES = 1500
"""Boxes of a chart of lanes. Shorter ones that touch are drawn as one."""
KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "accumulators": "accumulators",
    "optimizer_states": "optimizer states",
    "gathered": "gathered parameters",
    "buffers": "buffers",
    "checkpoints": "activation checkpoints",
    "activations": "activations",
    "temporary": "temporary",
    "rest": "everything else at the peak",
    "states": "states",
    "all": "all kinds",
}
"""Kinds of memory as a chart names them, in the order in which it stacks them."""
WAITS = {
    f"wait: {GATHER}": "wait: gather",
    f"wait: {REDUCE}": "wait: reduce",
    f"wait: {DOWN}": "wait: device → host",
    f"wait: {UPDATE}": "wait: host update",
    f"wait: {UP}": "wait: host → device",
    f"wait: {OTHER}": "nothing recorded",
}
WORKS = {
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "norm": "norm, clipping",
    "update": "update on device",
}


@dataclass(frozen=True)
class Table:
    """The values of a chart as text."""

    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Figure:
    """A chart with its title, a sentence in plain words, and its values as a table."""

    id: str
    title: str
    caption: str
    chart: dict[str, Any]
    table: Table


def figures(runs: Sequence[Summary]) -> list[Figure]:
    """The figures that these runs have data for."""
    found = [
        _loss(runs),
        _lr(runs),
        _speed(runs),
        *_memory(runs),
        _step(runs),
        *_lanes(runs),
        _volume(runs),
        _ranks(runs),
    ]
    return [figure for figure in found if figure is not None]


# -- lines --------------------------------------------------------------------------------------------------------


def _loss(runs: Sequence[Summary]) -> Figure | None:
    training = "training" if len(runs) == 1 else ""
    series = [(_label(run, runs, training), run.losses, lambda step: step.loss) for run in runs]
    held_out = [
        (_label(run, runs, "held out"), number, run.run.evaluations)
        for number, run in enumerate(runs)
        if run.run.evaluations
    ]
    bad = [f"{run.run.name}: {run.bad_losses}" for run in runs if run.bad_losses]
    caption = "The training loss by step, lower is better"
    caption += ", and the loss on held-out data as a dashed line." if held_out else "."
    caption += f" Losses that are NaN or infinite are gaps ({', '.join(bad)})." if bad else ""
    return _lines("loss", "Loss", caption, series, extra=held_out)


def _lr(runs: Sequence[Summary]) -> Figure | None:
    series = [(_label(run, runs), [s for s in run.run.steps if s.lr is not None], lambda step: step.lr) for run in runs]
    return _lines("lr", "Learning rate", "The learning rate of the optimizer's first group, by step.", series)


def _speed(runs: Sequence[Summary]) -> Figure | None:
    series = [(_label(run, runs), [s for s in run.run.steps if speed_of(s) is not None], speed_of) for run in runs]
    medians = [
        f"{_label(run, runs, 'median')} {number_text(run.tokens_a_second)}" for run in runs if run.tokens_a_second
    ]
    caption = f"Tokens of all ranks in a second, by step: {', '.join(medians)}. Pauses for evaluations are left out."
    return _lines("speed", "Tokens per second", caption, series, zero=True)


def _lines(
    name: str,
    title: str,
    caption: str,
    series: Sequence[tuple[str, Sequence[Step], Callable[[Step], float | None]]],
    *,
    extra: Sequence[tuple[str, int, Sequence[Evaluation]]] = (),
    zero: bool = False,
) -> Figure | None:
    drawn, rows, thin = [], [], False
    for number, (label, steps, value) in enumerate(series):
        if not steps:
            continue
        thin |= len(steps) > MOST_POINTS
        drawn.append({"name": label, "run": number, "points": _points(steps, value)})
        rows += _rows(label, steps, value)
    if not drawn:
        return None
    for label, number, evaluations in extra:
        thin |= len(evaluations) > MOST_POINTS
        points = _points(evaluations, lambda each: each.loss)
        drawn.append({"name": label, "run": number, "dashed": True, "points": points})
        rows += _rows(label, evaluations, lambda each: each.loss)
    if thin:
        caption += " Of a long run each point is the mean of some steps."
    chart = {"type": "lines", "x": "step", "y": title.lower(), "zero": zero, "series": drawn}
    return Figure(name, title, caption, chart, Table(["run", "step", title.lower()], rows))


def _points(entries: Sequence[Entry], value: Callable[[Entry], float | None]) -> list[list[Any]]:
    """The points of a line."""
    return [[group[-1].step, _mean([value(each) for each in group])] for group in thinned(entries, MOST_POINTS)]


def _rows(label: str, entries: Sequence[Entry], value: Callable[[Entry], float | None]) -> list[list[str]]:
    """The rows of a line in its table."""
    shown = thinned(entries, TABLE_ROWS)
    return [[label, _steps(group), _text(_mean([value(each) for each in group]))] for group in shown]


# -- memory -------------------------------------------------------------------------------------------------------


def _memory(runs: Sequence[Summary]) -> list[Figure | None]:
    device: list[tuple[str, dict[str, float]]] = []
    host: list[tuple[str, dict[str, float]]] = []
    peak: list[tuple[str, dict[str, float]]] = []
    plans = False
    for run in runs:
        memory, plan = run.memory, run.run.plan
        if memory is not None:
            device.append((_label(run, runs, "measured"), memory.device))
            if memory.host:
                host.append((_label(run, runs, "measured"), memory.host))
            if memory.peak is not None:
                known = {kind: memory.device.get(kind, 0.0) for kind in ("parameters", "optimizer_states", "buffers")}
                peak.append(
                    (_label(run, runs, "measured"), {**known, "rest": max(0.0, memory.peak - sum(known.values()))})
                )
        own = run.planned
        if plan is None or own is None:
            continue
        plans = True
        for row in [own, *(row for row in plan.rows if not row.own)]:
            title = _label(run, runs, _setting(row, own))
            device.append((title, row.at_step))
            if run.memory is not None and run.memory.host:
                host.append((title, {"all": row.host}))
            if memory is not None and memory.peak is not None:
                peak.append((title, row.peak))
    beside = ", beside what the plan says of this and of other settings" if plans else ""
    found = [
        _bars(
            "memory",
            "Device memory between backward and update",
            f"Bytes of one rank by kind, at the moment that the papers count{beside}. Activations are gone by then.",
            device,
            KINDS,
        ),
        _bars(
            "peak",
            "Device memory at its peak",
            f"The most that one rank had allocated{beside}. Of the measured peak only what stays in place is known by "
            "kind.",
            peak,
            KINDS,
        ),
    ]
    if host:
        caption = f"Bytes of one rank in host memory{beside}. The plan gives one number for all of them."
        found.append(_bars("host", "Host memory", caption, host, KINDS))
    return found


def _setting(row: PlanRow, own: PlanRow) -> str:
    """A row of a plan as charts name it."""
    if row.own:
        return f"planned, stage {row.stage}"
    if row.offload == own.offload:
        return f"stage {row.stage}"
    return f"stage {row.stage} without offload" if row.offload == "none" else f"stage {row.stage}, {row.offload}"


def _ranks(runs: Sequence[Summary]) -> Figure | None:
    rows: list[tuple[str, dict[str, float]]] = []
    for run in runs:
        if len(run.run.states_of_ranks) > 1:
            states = run.run.states_of_ranks
            rows += [(_label(run, runs, f"rank {rank}"), {"states": size}) for rank, size in enumerate(states)]
    if len(rows) > 64:  # then the largest are enough
        rows = sorted(rows, key=lambda row: -row[1]["states"])[:64]
    caption = "Bytes of model states on the device of each rank, between backward and update of the last step."
    return _bars("ranks", "Memory of all ranks", caption, rows, KINDS)


# -- a step -------------------------------------------------------------------------------------------------------


def _step(runs: Sequence[Summary]) -> Figure | None:
    titles = {**{part: WORKS[part] for part in PARTS}, **WAITS, "planned": "the whole step, by the plan"}
    rows: list[tuple[str, dict[str, float]]] = []
    for run in runs:
        if run.window is None:
            continue
        rows.append((_label(run, runs, f"step {run.window.step:,}"), run.window.shares))
        if run.planned is not None and run.planned.seconds is not None:
            rows.append((_label(run, runs, "planned"), {"planned": run.planned.seconds}))
    caption = (
        "Where the time of a traced step goes: computing in solid colours, and hatched what it waits for and nothing "
        "hides."
    )
    return _bars("step", "Where the time of a step goes", caption, rows, titles, unit="seconds", hatched=list(WAITS))


def _lanes(runs: Sequence[Summary]) -> list[Figure | None]:
    longest = max((run.window.seconds for run in runs if run.window is not None), default=0.0)
    return [_lane_chart(number, run, runs, longest) for number, run in enumerate(runs) if run.window is not None]


def _lane_chart(number: int, run: Summary, runs: Sequence[Summary], longest: float) -> Figure:
    window = run.window
    assert window is not None, "the caller has looked"
    boxes = [box for lane in LANES for box in _boxes(window, lane)]
    seen = [wait for wait in window.waits if wait.stop - wait.start > window.seconds / 1000]
    waits = [[wait.start, wait.stop, WAITS[f"wait: {wait.cause}"]] for wait in seen]
    rows = []
    for lane in LANES:
        busy, of_lane = window.busy(lane), [span for span in window.spans if span.lane == lane]
        waited = sum(wait.stop - wait.start for wait in window.waits if wait.cause == lane)
        rows.append([TITLES.get(lane, lane), str(len(of_lane)), seconds_text(busy), seconds_text(waited)])
    other = sum(wait.stop - wait.start for wait in window.waits if wait.cause == OTHER)
    rows.append(["nothing recorded", "", "", seconds_text(other)])
    dropped = run.run.traced.dropped if run.run.traced is not None else 0
    caption = (
        f"Step {window.step:,}, {seconds_text(window.seconds)}: what ran when on rank 0. Hatched bands are times in "
        "which nothing was computed; each is named after the work that computing waited for."
    )
    caption += f" {dropped:,} spans are left out." if dropped else ""
    return Figure(
        f"lanes-{number}",
        _label(run, runs, "One step on its lanes", ": "),
        caption,
        {
            "type": "lanes",
            "lanes": [TITLES.get(lane, lane) for lane in LANES],
            "boxes": boxes,
            "waits": waits,
            "seconds": window.seconds,
            "until": longest,
        },
        Table(["lane", "pieces of work", "busy", "computing waits for it"], rows),
    )


def _boxes(window: Window, lane: str) -> list[list[Any]]:
    """The work on one lane as [lane, start, stop, name]. Pieces that are too short to be seen are joined."""
    shortest = window.seconds / MOST_BOXES * 3
    found: list[list[Any]] = []
    for span in sorted((span for span in window.spans if span.lane == lane), key=lambda span: span.start):
        last = found[-1] if found else None
        short = last is not None and (span.stop - span.start < shortest or last[2] - last[1] < shortest)
        if last is not None and short and span.start - last[2] < shortest / 3:
            last[2], last[4] = max(last[2], span.stop), last[4] + 1
        else:
            found.append([LANES.index(lane), span.start, span.stop, span.name[:80], 1])
    return [
        [row, start, stop, name if count == 1 else f"{name} and {count - 1} more"]
        for row, start, stop, name, count in found
    ]


def _volume(runs: Sequence[Summary]) -> Figure | None:
    rows: list[tuple[str, dict[str, float]]] = []
    formulas = []
    for run in runs:
        volume, padded = run.run.volume, run.padded
        if volume is None or not padded or run.ranks < 2:
            continue
        rows.append((_label(run, runs, "measured"), {kind: size / padded for kind, size in volume.elements.items()}))
        if volume.expected is not None:
            rows.append((_label(run, runs, f"formula {volume.formula}"), {"formula": volume.expected}))
            formulas.append(_label(run, runs, f"{volume.formula} = {volume.expected:.3g} Ψ"))
        own = run.planned
        if own is not None:
            rows.append((_label(run, runs, "planned"), {"planned": own.volume / padded}))
    kinds = {
        "all_gather": "all-gather",
        "reduce_scatter": "reduce-scatter",
        "all_reduce": "all-reduce",
        "formula": "formula",
        "planned": "plan",
    }
    caption = (
        "What one rank communicates in a step, in Ψ, the number of parameters. ZeRO moves 2Ψ in stages 0 to 2 and up "
        f"to 3Ψ in stage 3; here: {'; '.join(formulas)}."
    )
    return _bars("volume", "Communication volume of a step", caption, rows, kinds, unit="Ψ")


def _bars(
    name: str,
    title: str,
    caption: str,
    rows: Sequence[tuple[str, dict[str, float]]],
    titles: dict[str, str],
    *,
    unit: str = "bytes",
    hatched: Sequence[str] = (),
) -> Figure | None:
    """Stacked bars, one for each row. None if there is nothing to show."""
    rows = [(label, {kind: value for kind, value in values.items() if abs(value) < LARGEST}) for label, values in rows]
    present = [kind for kind in titles if any(values.get(kind) for _, values in rows)]
    if not present:
        return None
    series = [
        {
            "name": titles[kind],
            "kind": kind,
            "hatched": kind in hatched,
            "values": [values.get(kind, 0.0) for _, values in rows],
        }
        for kind in present
    ]
    units: dict[str, Callable[[float], str]] = {"bytes": size_text, "seconds": seconds_text}
    write = units.get(unit) or (lambda value: f"{number_text(value)} {unit}")
    table = [
        [
            label,
            *(write(values.get(kind, 0.0)) for kind in present),
            write(sum(values.get(kind, 0.0) for kind in present)),
        ]
        for label, values in rows
    ]
    chart = {"type": "bars", "unit": unit, "rows": [label for label, _ in rows], "series": series}
    return Figure(name, title, caption, chart, Table(["", *(titles[kind] for kind in present), "total"], table))


# -- words and numbers --------------------------------------------------------------------------------------------


def _label(run: Summary, runs: Sequence[Summary], what: str = "", between: str = " · ") -> str:
    """What a row or line is about; with the run's name if there are several runs."""
    if len(runs) == 1:
        return what or run.run.name
    return f"{run.run.name}{between}{what}" if what else run.run.name


def _steps(group: Sequence[Entry]) -> str:
    first, last = group[0].step, group[-1].step
    return str(first) if first == last else f"{first} to {last}"


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean; None if a value is not finite, so that a line has a gap there."""
    numbers = [value for value in values if value is not None]
    if not numbers or not all(map(math.isfinite, numbers)):
        return None
    try:
        return math.fsum(numbers) / len(numbers)
    except OverflowError:  # the sum is too large, and the mean is not
        return math.fsum(number / len(numbers) for number in numbers)


def _text(value: float | None) -> str:
    return "not finite" if value is None else number_text(value)
