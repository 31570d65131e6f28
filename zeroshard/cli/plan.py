"""`zeroshard plan`: what fits, what it communicates and how long it takes, before anything is started."""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zeroshard.config import DTYPES
from zeroshard.plan import calibrate, choice, paper
from zeroshard.plan.budget import KINDS, DeviceMemory
from zeroshard.plan.choice import Row
from zeroshard.plan.hardware import GB, Hardware, find_hardware
from zeroshard.plan.models import Subject, find_model
from zeroshard.plan.scale import cost, doubling, scale
from zeroshard.plan.shape import Setup, Transformer

DESCRIPTION = """\
Say what fits and how fast it is, for every ZeRO stage and offload: memory of one rank by kind,
volume, predicted step time and what bounds it; recommend one, with the call and the command.
Nothing is allocated. Without hardware options: this machine.
"""
EXAMPLES = """\
examples:
  zeroshard plan --model zero-1.5b                              a preset, on this machine
  zeroshard plan --model zero-100b --gpus 400 --machine v100    on hardware you do not have
  zeroshard plan --model llama/config.json --gpus 8 --gpu-memory 80 --batch max
  zeroshard plan --model my_project.models:build --seq 2048     any nn.Module, traced on the meta device
  zeroshard plan --max-model --gpus 16 --gpu-memory 32          the largest model for this hardware
  zeroshard plan --model zero-8b --gpus 64 --machine h100 --tokens 300e9
  zeroshard plan --model zero-8b --machine h100 --scale 8..8192
  zeroshard plan --calibrate mine.toml                          measure this machine, for --machine mine.toml
  zeroshard plan --paper                                        the papers' claims beside ours
"""
BAD_INPUT = 2
NOTHING_FITS = 1
BAR = 36  # characters that stand for the whole device
WIDTH = 132  # of what is printed where there is no terminal
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
WORDS = {"gathered": "gathered parameters", "optimizer_states": "optimizer states"}


def define(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `plan` to the command line."""
    parser = add_parser(
        "plan",
        help="say what fits and how fast it is, for every stage and offload, before anything is started",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a preset, a .toml configuration, a Hugging Face config.json, or module:factory",
    )
    job = parser.add_argument_group("the job")
    job.add_argument("--batch", type=_batch, metavar="N|max", help="sequences a rank (default: the preset's, or 1)")
    job.add_argument("--seq", type=int, metavar="N", help="tokens a sequence (default: the model's, at most 1024)")
    job.add_argument("--micro-batches", type=int, default=1, metavar="N", help="that add up to a step (default: 1)")
    job.add_argument("--precision", choices=DTYPES, help="by default bf16, and fp32 on a machine without GPU")
    job.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        help="keep one tensor a block and recompute the rest (default: as the preset has it, else yes)",
    )
    job.add_argument("--model-parallel", type=int, default=1, metavar="M", help="ranks that share each block")
    hardware = parser.add_argument_group("hardware")
    hardware.add_argument("--gpus", type=int, metavar="N", help="in all nodes together")
    hardware.add_argument("--nodes", type=int, metavar="N")
    hardware.add_argument("--gpu-memory", type=float, metavar="GB", help="of one GPU")
    hardware.add_argument("--host-memory", type=float, metavar="GB", help="of one node")
    hardware.add_argument("--machine", metavar="NAME", help="a profile: a100, h100, h200, v100, cpu, or a .toml file")
    asked = parser.add_argument_group("questions")
    asked.add_argument("--max-model", action="store_true", help="the largest GPT that fits, by stage and offload")
    asked.add_argument("--tokens", type=float, metavar="T", help="days and GPU-hours of training on so many")
    asked.add_argument("--scale", type=_span, metavar="A..B", help="efficiency from A to B devices")
    asked.add_argument("--paper", action="store_true", help="print the claims of the two papers beside ours")
    asked.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="measure this machine in a minute; write a profile for --machine"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Answer what was asked; 2 for bad input, 1 if nothing fits."""
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    try:
        _check(arguments)
        if arguments.paper:
            paper.render(console)
            return 0
        if arguments.calibrate is not None:
            return _calibrate(arguments.calibrate, console)
        return _answer(arguments, console)
    except ValueError as error:
        print(f"zeroshard plan: {error}", file=sys.stderr)
        return BAD_INPUT


def _check(arguments: argparse.Namespace) -> None:
    if arguments.model is None and not (arguments.max_model or arguments.paper or arguments.calibrate):
        raise ValueError("--model is needed: a preset, a Hugging Face config.json, or module:factory")
    for option in ("seq", "micro_batches", "model_parallel", "tokens"):
        value = getattr(arguments, option)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{option.replace('_', '-')} {value:g}: must be above 0")
    if arguments.max_model and arguments.batch == "max":
        raise ValueError("--batch max and --max-model both ask for the largest; give a number to one of them")


def _calibrate(file: Path, console: Console) -> int:
    if file.suffix != ".toml" or not file.absolute().parent.is_dir():
        raise ValueError(f"--calibrate {file}: must be a .toml file in a folder that exists")
    found = calibrate.calibrate()
    calibrate.write(found, file)
    console.print(f"Measured in {found.seconds:.0f} s: {', '.join(sorted(found.measured))}", highlight=False)
    console.print(f"  zeroshard plan --model MODEL --machine {file}", highlight=False, soft_wrap=True)
    return 0


def _answer(arguments: argparse.Namespace, console: Console) -> int:
    hardware = find_hardware(
        gpus=arguments.gpus if arguments.gpus is not None or arguments.scale is None else arguments.scale[0],
        nodes=arguments.nodes,
        gpu_memory=arguments.gpu_memory,
        host_memory=arguments.host_memory,
        profile=arguments.machine,
    )
    subject = find_model(arguments.model) if arguments.model is not None else None
    setup = _setup(arguments, subject, hardware)
    if arguments.max_model:
        vocabulary = choice.VOCABULARY
        if subject is not None and subject.transformer is not None:
            vocabulary = subject.transformer.vocabulary
        return _largest_models(choice.largest_models(setup, hardware, vocabulary), hardware, arguments, console)
    assert subject is not None
    rows = choice.plan(subject, setup, hardware, arguments.batch or subject.batch)
    best = choice.recommend(rows)
    extras = _extras(arguments, best or rows[-1], hardware)
    if arguments.json:
        print(json.dumps(_as_json(rows, best, hardware, subject) | extras, indent=2))
    else:
        _print_rows(rows, best, hardware, console)
        _print_recommendation(best, rows, subject, hardware, console)
        _print_extras(extras, console)
    return 0 if best is not None else NOTHING_FITS


def _setup(arguments: argparse.Namespace, subject: Subject | None, hardware: Hardware) -> Setup:
    degree = arguments.model_parallel
    if hardware.gpus % degree:
        raise ValueError(f"--model-parallel {degree} does not divide {hardware.gpus} devices")
    sequence = arguments.seq or (subject.sequence if subject is not None else 1024)
    if subject is not None and subject.longest is not None and sequence > subject.longest:
        raise ValueError(f"--seq {sequence}: {subject.name} takes {subject.longest} tokens at most")
    checkpointing = arguments.checkpointing
    if checkpointing is None:
        checkpointing = subject.checkpointing if subject is not None else True
    return Setup(
        stage=0,
        world=hardware.gpus // degree,
        model_parallel=degree,
        precision=arguments.precision or ("fp32" if hardware.on_cpu else "bf16"),
        batch=arguments.batch if isinstance(arguments.batch, int) else 1,
        sequence=sequence,
        micro_batches=arguments.micro_batches,
        checkpointing=checkpointing,
    )


def _extras(arguments: argparse.Namespace, row: Row, hardware: Hardware) -> dict[str, Any]:
    """What --tokens and --scale ask, about the recommended row."""
    found: dict[str, Any] = {}
    if arguments.tokens is None and arguments.scale is None:
        return found
    if not isinstance(row.model, Transformer) or hardware.machine is None:
        asked = "--tokens" if arguments.tokens is not None else "--scale"
        raise ValueError(f"{asked} needs a predicted time: give a preset or config.json as model, and --machine NAME")
    if arguments.tokens is not None:
        price = cost(row.model, row.setup, hardware.machine, arguments.tokens)
        found["training"] = {
            "tokens": arguments.tokens,
            "steps": math.ceil(price.steps),
            "days": price.days,
            "gpu_hours": price.device_hours,
        }
    if arguments.scale is not None:
        points = scale(row.model, row.setup, hardware.machine, doubling(*arguments.scale))
        found["scale"] = [
            {
                "gpus": point.devices,
                "step_seconds": point.time.total,
                "tokens_a_second": point.tokens_a_second,
                "efficiency": point.efficiency,
                "exposed_communication": point.exposed,
            }
            for point in points
        ]
    return found


# -- printing ---------------------------------------------------------------------------------------------------------


def _print_rows(rows: Sequence[Row], best: Row | None, hardware: Hardware, console: Console) -> None:
    model, setup = rows[0].model, rows[0].setup
    batches = {row.setup.batch for row in rows}
    kept = ", checkpointed" if setup.checkpointing and isinstance(model, Transformer) else ""
    batch = f"batch {setup.batch}" if len(batches) == 1 else "largest batch"
    console.print(
        f"{model.name}: {_count(model.parameters)} parameters, {setup.precision}, {batch} × {setup.sequence}{kept}"
    )
    console.print(f"on {hardware}", highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("stage", justify="right")
    table.add_column("offload", no_wrap=True)
    if len(batches) > 1:
        table.add_column("batch", justify="right")
    table.add_column(f"peak of one rank; {BAR} characters are {hardware.device_memory / GB:.4g} GB", no_wrap=True)
    for title in ("GB", "room", "host GB", "volume"):
        table.add_column(title, justify="right", no_wrap=True)
    timed = any(row.time is not None for row in rows)
    if timed:
        table.add_column("step", justify="right", no_wrap=True)
        table.add_column("bound by", overflow="ellipsis", no_wrap=True)
    for row in rows:
        cells: list[str | Text] = [str(row.setup.stage), row.variant.name]
        if len(batches) > 1:
            cells.append(str(row.setup.batch))
        host = row.budget.host.total
        cells += [
            _bar(row.budget.peak, hardware),
            _gb(row.budget.peak.total),
            Text(_gb(row.room, sign=True), style="green" if row.room >= 0 else "red"),
            Text(_gb(host) if host else "", style="red" if host and row.host_room < 0 else ""),
            f"{row.volume.elements / _per_rank(row):.2f}Ψ",
        ]
        if timed:
            cells += [f"{row.time.total:.3g} s", row.time.bottleneck.value] if row.time is not None else ["", ""]
        table.add_row(*cells, style="bold" if row is best else "" if row.fits else "dim")
    console.print(table)
    legend = Text("  ").join(
        Text(f"{letter} {WORDS.get(kind, kind)}", style=colour) for kind, (letter, colour) in LETTERS.items()
    )
    console.print(legend)
    console.print(
        "room: beside what driver and allocator take; host GB: of one rank, red if its part of the node has less\n",
        highlight=False,
    )


def _per_rank(row: Row) -> float:
    """Ψ of one rank: model parallelism leaves it a part."""
    return row.model.parameters / row.setup.model_parallel


def _bar(memory: DeviceMemory, hardware: Hardware) -> Text:
    """One letter for each share of the device; what is beyond it ends in an arrow."""
    scale_ = BAR / hardware.device_memory
    bar, drawn, total = Text(), 0, 0.0
    for kind in KINDS:
        total += getattr(memory, kind)
        until = min(BAR, round(total * scale_))
        letter, colour = LETTERS[kind]
        bar.append(letter * (until - drawn), style=colour)
        drawn = max(drawn, until)
    bar.append("·" * (BAR - drawn), style="dim")
    bar.append("→" if total * scale_ > BAR + 0.5 else " ", style="red")
    return bar


def _print_recommendation(
    best: Row | None, rows: Sequence[Row], subject: Subject, hardware: Hardware, console: Console
) -> None:
    if best is None:
        nearest = max(rows, key=lambda row: min(row.room, row.host_room if row.setup.offload is not None else row.room))
        lacks = "device" if nearest.room < 0 else "host"
        missing = -nearest.room if nearest.room < 0 else -nearest.host_room
        console.print(
            f"Nothing fits. Stage {nearest.setup.stage}, offload {nearest.variant.name} comes nearest: a rank lacks "
            f"{_gb(missing)} GB of {lacks} memory. Use more GPUs, a smaller --batch or --seq, or --checkpointing.",
            highlight=False,
        )
        return
    needs, setup = best.budget, best.setup
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column(f"GB of one rank in stage {setup.stage}, offload {best.variant.name}")
    table.add_column("at the step", justify="right")
    table.add_column(f"at the peak, in {needs.phase.value}", justify="right")
    for kind in KINDS:
        step, peak = getattr(needs.at_step, kind), getattr(needs.peak, kind)
        if step or peak:
            table.add_row(WORDS.get(kind, kind), _gb(step), _gb(peak))
    table.add_row("total", _gb(needs.at_step.total), _gb(needs.peak.total), style="bold")
    if needs.host.total:
        table.add_row("host memory, pinned", _gb(needs.host.pinned), "")
        table.add_row("host memory, pageable", _gb(needs.host.pageable), "")
    console.print(table)
    why = "the fastest that fits" if best.time is not None else "it fits and changes least"
    console.print(f"\nTake stage {setup.stage}, offload {best.variant.name}: {why}.", style="bold", highlight=False)
    if setup.offload is not None and setup.offload.update_in_backward:
        console.print("It updates in backward, so it excludes clip_grad_norm and several micro-batches.")
    console.print(f"  model, optimizer = {choice.shard_call(setup)}", highlight=False, soft_wrap=True)
    command = choice.torchrun_command(setup, hardware, subject.preset)
    console.print(f"  {command}", highlight=False, soft_wrap=True)


def _print_extras(extras: dict[str, Any], console: Console) -> None:
    if "training" in extras:
        told = extras["training"]
        console.print(
            f"\n{_count(told['tokens'])} tokens: {told['steps']:,} steps, {told['days']:.3g} days, "
            f"{told['gpu_hours']:,.0f} GPU-hours",
            highlight=False,
        )
    if "scale" in extras:
        table = Table(box=None, pad_edge=False, padding=(0, 2))
        for title in ("GPUs", "step s", "tokens/s", "efficiency", "exposed communication"):
            table.add_column(title, justify="right")
        for point in extras["scale"]:
            table.add_row(
                str(point["gpus"]),
                f"{point['step_seconds']:.3g}",
                f"{point['tokens_a_second']:,.0f}",
                f"{point['efficiency']:.0%}",
                f"{point['exposed_communication']:.0%}",
            )
        console.print()
        console.print(table)


def _largest_models(
    found: Iterable[tuple[Row, Transformer | None]],
    hardware: Hardware,
    arguments: argparse.Namespace,
    console: Console,
) -> int:
    found = list(found)
    if arguments.json:
        answer = [
            {
                "stage": row.setup.stage,
                "offload": row.variant.name,
                "parameters": model.parameters if model is not None else 0,
                "layers": model.layers if model is not None else 0,
                "hidden": model.hidden if model is not None else 0,
            }
            for row, model in found
        ]
        print(json.dumps({"hardware": _hardware_json(hardware), "largest": answer}, indent=2))
        return 0
    setup = found[0][0].setup
    console.print(f"The largest GPT: {setup.precision}, batch {setup.batch} × {setup.sequence}")
    console.print(f"on {hardware}", highlight=False)
    most = max((model.parameters for _, model in found if model is not None), default=1)
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for title in ("stage", "offload", "parameters", "layers × hidden", "", "peak GB", "host GB", "step"):
        table.add_column(title, justify="left" if title in ("offload", "") else "right", no_wrap=True)
    for row, model in found:
        if model is None:
            table.add_row(str(row.setup.stage), row.variant.name, "none", style="dim")
            continue
        host, time = row.budget.host.total, row.time
        table.add_row(
            str(row.setup.stage),
            row.variant.name,
            _count(model.parameters),
            f"{model.layers} × {model.hidden}",
            "█" * max(1, round(BAR * model.parameters / most)),
            _gb(row.budget.peak.total),
            _gb(host) if host else "",
            f"{time.total:.3g} s" if time is not None else "",
        )
    console.print(table)
    return 0 if any(model is not None for _, model in found) else NOTHING_FITS


# -- for programs -----------------------------------------------------------------------------------------------------


def _as_json(rows: Sequence[Row], best: Row | None, hardware: Hardware, subject: Subject) -> dict[str, Any]:
    return {
        "model": {"name": subject.name, "parameters": rows[0].model.parameters},
        "hardware": _hardware_json(hardware),
        "rows": [_row_json(row) for row in rows],
        "recommended": None
        if best is None
        else {
            "stage": best.setup.stage,
            "offload": best.variant.name,
            "batch": best.setup.batch,
            "shard": choice.shard_call(best.setup),
            "command": choice.torchrun_command(best.setup, hardware, subject.preset),
        },
    }


def _hardware_json(hardware: Hardware) -> dict[str, Any]:
    return {
        "gpus": hardware.gpus,
        "nodes": hardware.nodes,
        "device_memory": hardware.device_memory,
        "host_memory": hardware.host_memory,
        "profile": hardware.machine.name if hardware.machine is not None else None,
        "profile_guessed": hardware.guessed,
    }


def _row_json(row: Row) -> dict[str, Any]:
    time, needs = row.time, row.budget
    return {
        "stage": row.setup.stage,
        "offload": row.variant.name,
        "batch": row.setup.batch,
        "fits": row.fits,
        "room": row.room,
        "host_room": row.host_room,
        "at_step": asdict(needs.at_step) | {"total": needs.at_step.total},
        "peak": asdict(needs.peak) | {"total": needs.peak.total, "phase": needs.phase.value},
        "host": asdict(needs.host),
        "volume": asdict(row.volume) | {"elements": row.volume.elements},
        "time": None
        if time is None
        else {
            "step": time.total,
            "compute": time.compute,
            "update": time.update,
            "exposed_communication": time.exposed,
            "exposed_pcie": time.exposed_pcie,
            "tflops_per_device": time.tflops_per_device,
            "bottleneck": time.bottleneck.value,
        },
    }


# -- values -----------------------------------------------------------------------------------------------------------


def _batch(text: str) -> int | Literal["max"]:
    if text == "max":
        return "max"
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1, or max")
    return int(text)


def _span(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} must be two numbers of devices, the smaller first: 8..8192")
    return int(match[1]), int(match[2])


def _count(number: float) -> str:
    """Return a number in thousands, millions and so on."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _gb(size: float, *, sign: bool = False) -> str:
    digits = 1 if abs(size) >= 10 * GB else 2 if abs(size) >= 0.1 * GB else 3
    return f"{size / GB:{'+' if sign else ''},.{digits}f}"
