"""Prints the plan: a row with a bar for every stage and offload, the recommended row, and the answers to questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config.job import ModelConfig
from . import command
from .advice import AS_FAST, LARGEST_BATCH, Row
from .machine.hardware import GB, Hardware
from .memory.device_memory import KIND_TITLES, KINDS, DeviceMemory
from .model.source import Subject
from .time.step_time import Bottleneck

BAR = 32  # characters of a bar; the bar is the whole device
COLUMN = 8  # characters of an optional column
WIDE = 120  # terminals narrower than this have no bars
NARROW = 76  # narrower ones have no column "bound by"
LINE = 70  # characters of a line of code
LETTERS = {
    "parameters": ("P", "blue"),
    "gradients": ("G", "yellow"),
    "accumulators": ("C", "bright_yellow"),
    "optimizer_states": ("O", "magenta"),
    "buffers": ("B", "white"),
    "activations": ("A", "green"),
    "gathered": ("W", "cyan"),
    "temporary": ("T", "bright_black"),
}
BOUNDS = {
    Bottleneck.COMPUTE: "compute",
    Bottleneck.LAUNCH: "launching",
    Bottleneck.UPDATE: "update",
    Bottleneck.NODE_LINKS: "links in node",
    Bottleneck.NETWORK: "network",
    Bottleneck.PCIE: "PCIe",
}


def print_title(rows: Sequence[Row], subject: Subject, hardware: Hardware, console: Console) -> None:
    """Prints what is planned, and for which hardware."""
    setup = rows[0].setup
    checkpointed = ", checkpointed" if all(row.setup.checkpointing and not row.traced.kept for row in rows) else ""
    checkpointed = ", some blocks recomputed" if _some_recomputed(rows) else checkpointed
    tokens = f" × {setup.sequence}" if rows[0].traced.tokens_known else ""
    batch = f"batch {setup.batch}" if len({row.setup.batch for row in rows}) == 1 else "largest batch"
    console.print(
        f"{subject.name}: {_count(rows[0].parameters)} parameters, {setup.precision}, {batch}{tokens}{checkpointed}",
        markup=False,
        highlight=False,
    )
    console.print(f"on {hardware}\n", highlight=False, markup=False)


def print_rows(rows: Sequence[Row], best: Row | None, hardware: Hardware, console: Console) -> None:
    """Prints every stage and offload, with the memory of one rank as a bar where there is room for it."""
    batches = {row.setup.batch for row in rows}
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("offload", no_wrap=True)
    if len(batches) > 1:
        table.add_column("batch", justify="right", no_wrap=True)
    some = _some_recomputed(rows)
    if some:
        table.add_column("again", justify="right", no_wrap=True)
    bars = console.width >= WIDE
    gathers = any(row.volume.checkpoints_gathered for row in rows)
    width = BAR - COLUMN * (gathers + some + (len(batches) > 1))
    if bars:
        table.add_column(f"peak, of {hardware.device_memory / GB:.4g} GB", no_wrap=True)
    for title in ("GB", "room", "host", "fits", "volume"):
        table.add_column(title, justify="right", no_wrap=True)
    if gathers:
        table.add_column("P_a", justify="right", no_wrap=True)
    timed = any(row.time is not None for row in rows)
    bounds = timed and console.width >= NARROW + COLUMN * (gathers + some + (len(batches) > 1))
    if timed:
        table.add_column("step", justify="right", no_wrap=True)
    if bounds:
        table.add_column("bound by", overflow="ellipsis", no_wrap=True)
    for row in rows:
        cells: list[str | Text] = [str(row.setup.stage), row.variant.name]
        if len(batches) > 1:
            cells.append(str(row.setup.batch))
        if some:
            cells.append(f"{row.recomputed}/{row.traced.blocks}")
        if bars:
            cells.append(_bar(row.budget.peak, hardware, width))
        host = row.budget.host.total
        cells += [
            _gb(row.budget.peak.total),
            Text(_gb(row.room, sign=True), style="green" if row.room >= 0 else "red"),
            Text(_gb(host) if host else "", style="red" if host and row.host_room < 0 else ""),
            "yes" if row.fits else "no",
            f"{row.volume.elements / row.traced.parameters:.2f}Ψ",
        ]
        if gathers:
            cells.append(f"{row.volume.checkpoints_gathered / row.traced.parameters:.3g}Ψ")
        if timed:
            cells.append(_step(row))
        if bounds:
            cells.append("" if row.time is None else BOUNDS[row.time.bottleneck])
        table.add_row(*cells, style="bold" if row is best else "" if row.fits else "dim")
    console.print(table)
    if LARGEST_BATCH in batches:
        console.print(f"More than {LARGEST_BATCH:,} sequences a rank were not tried.", highlight=False)
    if bars:
        legend = (Text(f"{letter} {KIND_TITLES[kind]}", style=colour) for kind, (letter, colour) in LETTERS.items())
        console.print(Text("  ").join(legend))
    console.print(
        "GB: the peak of one rank. room: what stays free after driver and allocator. host: GB of one rank, whose part "
        f"of the node is {_gb(hardware.host_memory_per_rank)}."
        + (" again: blocks that run again in backward." if some else "")
        + (" P_a: checkpoints that model-parallel ranks gather in a step." if gathers else "")
        + (f" step: {_reason(rows)}." if timed and any(row.span and row.span[0] < row.span[1] for row in rows) else ""),
        highlight=False,
    )


def _some_recomputed(rows: Sequence[Row]) -> bool:
    """True if rows differ in the blocks that are recomputed, or recompute a part of them."""
    return any(row.traced.kept for row in rows) or len({row.setup.checkpointing for row in rows}) > 1


def _step(row: Row) -> str:
    """The seconds of a step: one number, or the least and the most."""
    return "" if row.span is None else _seconds(*row.span)


def _reason(rows: Sequence[Row]) -> str:
    """Why the time of a step is a range."""
    machine = rows[0].hardware.machine
    assert machine is not None
    if machine.spread == (1.0, 1.0):
        return "a range where launching matters, which depends on the processor's other work"
    return "a range, because this machine was not measured; `zeroshard plan --calibrate` measures the one it runs on"


def _bar(memory: DeviceMemory, hardware: Hardware, width: int) -> Text:
    """A bar with a letter for each part of the device. An arrow means: more than the device has."""
    scale_ = width / hardware.device_memory
    bar, drawn, total = Text(), 0, 0.0
    for kind in KINDS:
        total += getattr(memory, kind)
        until = min(width, round(total * scale_))
        letter, colour = LETTERS[kind]
        bar.append(letter * (until - drawn), style=colour)
        drawn = max(drawn, until)
    bar.append("·" * (width - drawn), style="dim")
    bar.append("→" if total * scale_ > width + 0.5 else " ", style="red")
    return bar


def print_recommendation(
    best: Row | None, rows: Sequence[Row], subject: Subject, hardware: Hardware, console: Console
) -> None:
    """Prints the recommended stage and offload, its call and its command; or says what is missing."""
    if best is None:
        console.print(_shortage(rows) + "\n", highlight=False)
        return
    setup = best.setup
    if best.time is None:
        why = "it fits and changes least"
    elif best is max((row for row in rows if row.fits), key=lambda row: row.tokens_a_second or 0.0):
        why = f"the fastest that fits, {_step(best)} a step"
    else:
        why = f"{_step(best)} a step, within {1 - AS_FAST:.0%} of the fastest, and it changes least"
    console.print(f"Take stage {setup.stage}, offload {best.variant.name}: {why}.", style="bold", highlight=False)
    if setup.offload is not None and setup.offload.update_in_backward:
        console.print("It updates in backward, so it excludes clip_grad_norm and several micro-batches.")
    if best.traced.kept or (_some_recomputed(rows) and not setup.checkpointing):
        number = f"{best.recomputed} of {best.traced.blocks} blocks" if best.recomputed else "no block"
        console.print(f"It recomputes {number}: there is room for the activations of the others.", highlight=False)
    call = f"model, optimizer = {command.shard_call(setup)}"
    for line in _broken(call, ", ", ",") + _broken(command.torchrun_command(setup, hardware, subject), " --", " \\"):
        console.print(f"  {line}", highlight=False, soft_wrap=True, markup=False)
    console.print()


def print_memory(best: Row, console: Console) -> None:
    """Prints the memory of the recommended row by kind."""
    needs, setup = best.budget, best.setup
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column(f"GB of one rank in stage {setup.stage}")
    table.add_column("at the step", justify="right")
    table.add_column(f"at the peak, in {needs.phase.value}", justify="right")
    for kind in KINDS:
        step, peak = getattr(needs.at_step, kind), getattr(needs.peak, kind)
        if step or peak:
            table.add_row(KIND_TITLES[kind], _gb(step), _gb(peak))
    table.add_row("total", _gb(needs.at_step.total), _gb(needs.peak.total), style="bold")
    if needs.host.total:
        table.add_row("host memory, pinned", _gb(needs.host.pinned), "")
        table.add_row("host memory, pageable", _gb(needs.host.pageable), "")
    console.print()
    console.print(table)
    if best.volume.checkpoints_to_host:
        down, up = _gb(best.volume.checkpoints_to_host), _gb(best.volume.checkpoints_to_device)
        console.print(f"Checkpoints: {down} GB to the host in a step, and {up} GB back.", highlight=False)


def _broken(text: str, before: str, end: str) -> list[str]:
    """A long line as several lines, broken where ``before`` stands. Broken lines end with ``end``.

    >>> _broken("run" + " --option value" * 6, " --", " +")
    ['run --option value --option value --option value --option value +', '    --option value --option value']
    """
    first, *rest = text.split(before)
    lines = [first]
    for part in rest:
        if len(lines[-1]) + len(before) + len(part) > LINE:
            lines[-1] += end
            lines.append(f"    {before.strip(', ')}{part}")
        else:
            lines[-1] += f"{before}{part}"
    return lines


def _shortage(rows: Sequence[Row]) -> str:
    """Names the row that comes nearest to fitting, what this row lacks, and what to try."""

    def lacking(row: Row) -> dict[str, float]:
        return {kind: -room for kind, room in (("device", row.room), ("host", row.host_room)) if room < 0}

    nearest = min(rows, key=lambda row: sum(lacking(row).values()))
    on_cpu = nearest.hardware.on_cpu  # all memory is host memory
    kinds = {"device": "" if on_cpu else "device ", "host": "host "}
    missing = " and ".join(f"{_gb(size)} GB of {kinds[kind]}memory" for kind, size in lacking(nearest).items())
    setup = nearest.setup
    remedies = ["more nodes" if on_cpu else "more GPUs", *(["a smaller --batch"] if setup.batch > 1 else [])]
    remedies += ["a smaller --seq"] if nearest.traced.tokens_known else []
    remedies += [] if setup.checkpointing else ["--checkpointing"]
    return (
        f"Nothing fits. Stage {setup.stage}, offload {nearest.variant.name} comes nearest: a rank lacks {missing}. "
        f"Use {' or '.join([', '.join(remedies[:-1]), remedies[-1]] if remedies[1:] else remedies)}."
    )


def print_extras(extras: dict[str, Any], console: Console) -> None:
    """Prints the cost of a whole training, and how the job scales."""
    if "training" in extras:
        told = extras["training"]
        console.print(
            f"\n{_count(told['tokens'])} tokens: {told['steps']:,} steps, {_span(*told['days_span'])} days, "
            f"{_span(*told['gpu_hours_span'])} GPU-hours",
            highlight=False,
        )
    if "scale" in extras:
        table = Table(box=None, pad_edge=False, padding=(0, 2))
        counted = next(name for name in ("tokens", "samples") if f"{name}_a_second" in extras["scale"][0])
        for title in ("devices", "step s", f"{counted}/s", "efficiency", "exposed communication", "fits"):
            table.add_column(title, justify="right")
        for point in extras["scale"]:
            least, most = (end / point["step_seconds"] for end in point["step_span"])
            speeds = [point[f"{counted}_a_second"] / factor for factor in (most, least)]
            table.add_row(
                str(point["gpus"]),
                _span(*point["step_span"]),
                "–".join(dict.fromkeys(map(_count, speeds))),
                f"{point['efficiency']:.0%}",
                f"{point['exposed_communication']:.0%}",
                "yes" if point["fits"] else "no",
                style="" if point["fits"] else "dim",
            )
        console.print()
        console.print(table)


def print_largest(found: Sequence[tuple[Row, ModelConfig | None]], hardware: Hardware, console: Console) -> None:
    """Prints the largest model of each stage and offload, with a bar."""
    setup = found[0][0].setup
    console.print(f"The largest GPT: {setup.precision}, batch {setup.batch} × {setup.sequence}")
    console.print(f"on {hardware}", highlight=False, markup=False)
    most = max((model.parameters for _, model in found if model is not None), default=1)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    bars = console.width >= WIDE
    titles = ("stage", "offload", "parameters", "layers × hidden", *([""] if bars else []), "GB", "host", "step")
    for title in titles:
        table.add_column(title, justify="left" if title in ("offload", "") else "right", no_wrap=True)
    for row, model in found:
        if model is None:
            table.add_row(str(row.setup.stage), row.variant.name, "none", style="dim")
            continue
        host = row.budget.host.total
        table.add_row(
            str(row.setup.stage),
            row.variant.name,
            _count(model.parameters),
            f"{model.layers} × {model.hidden}",
            *(["█" * max(1, round(BAR * model.parameters / most))] if bars else []),
            _gb(row.budget.peak.total),
            _gb(host) if host else "",
            _step(row),
        )
    console.print(table)


def _count(number: float) -> str:
    """A number in thousands (K), millions (M), billions (B) or trillions (T)."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _seconds(least: float, most: float) -> str:
    """A time in seconds or milliseconds, or the least and the most.

    >>> _seconds(0.00135, 0.00135), _seconds(6780.0, 6780.0), _seconds(0.0613, 0.0917), _seconds(2.0, 2.8)
    ('1.35 ms', '6,780 s', '61–92 ms', '2.0–2.8 s')
    """
    factor, unit = (1e3, "ms") if least < 0.1 else (1.0, "s")
    return f"{_span(factor * least, factor * most)} {unit}"


def _span(least: float, most: float) -> str:
    """Two numbers with two digits each; one number with three, if they are equal."""
    if least == most:
        return f"{least:,.0f}" if least >= 1000 else f"{least:.3g}"
    return "–".join(f"{end:,.0f}" if end >= 100 else f"{end:#.2g}".rstrip(".") for end in (least, most))


def _gb(size: float, *, sign: bool = False) -> str:
    """A table cell in GB, so that the cells of a column can be compared."""
    digits = 0 if abs(size) >= 1000 * GB else 1 if abs(size) >= 10 * GB else 2 if abs(size) >= 0.1 * GB else 3
    return f"{size / GB:{'+' if sign else ''},.{digits}f}"
