"""`zeroshard plan`: which setups fit, what they communicate and how long a step takes, before anything starts."""

import argparse
import json
import math
import os
import re
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from ..calibrate import measure as calibrate
from ..comm.process_group import end_process_group, start_process_group
from ..config.checks import DTYPES
from ..config.options import AUTO, Activations, Config
from ..plan import advice, as_json, largest, report
from ..plan.machine.hardware import MOST, Hardware, find_hardware
from ..plan.machine.profile import calibrated_file
from ..plan.model.gpt import from_config
from ..plan.model.lora import with_adapters
from ..plan.model.module import gathering
from ..plan.model.source import Subject, find_model
from ..plan.papers import table as paper_table
from ..plan.setup import Setup
from ..system import machine

HELP = "say what fits and how fast it is, for every stage and offload, before anything is started"
DESCRIPTION = """\
Say what fits and how fast it is, for every ZeRO stage and offload: memory of one rank by kind,
volume, predicted step time and what bounds it; recommend one, with the call and the command.
Nothing is allocated. Without hardware options: this machine.
"""
EXAMPLES = """\
examples:
  zeroshard plan zero-1.5b                              a preset, on this machine
  zeroshard plan zero-100b --gpus 400 --machine v100    on hardware you do not have
  zeroshard plan llama/ --gpus 8 --gpu-memory 80 --batch max
  zeroshard plan llama/config.json --lora 16            adapters on a frozen model
  zeroshard plan my_project.models:build --seq 2048     any nn.Module
  zeroshard plan --max-model --gpus 16 --gpu-memory 32  the largest GPT for this hardware
  zeroshard plan zero-8b --gpus 64 --machine h100 --tokens 300e9
  zeroshard plan zero-8b --machine h100 --scale 8..8192
  zeroshard plan --calibrate                            measure this machine, once
  zeroshard plan --paper                                the papers' claims beside ours
"""
NOTHING_FITS = 1
MOST_OF = {"seq": 1 << 30, "micro_batches": 1 << 16, "lora": 1 << 14}
"""Limits of the options: more than this is a typing mistake."""
WIDTH = 80  # characters of a line where there is no terminal


def define(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan`."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a preset, a .toml configuration, a Hugging Face config.json or model folder, or module:factory",
    )
    parser.add_argument("--model", dest="model_option", metavar="MODEL", help="the same, as an option")
    job = parser.add_argument_group("the job")
    job.add_argument("--batch", type=_batch, metavar="N|max", help="sequences a rank (default: the preset's, or 1)")
    job.add_argument("--seq", type=int, metavar="N", help="tokens a sequence (default: the model's, at most 1024)")
    job.add_argument("--micro-batches", type=int, default=1, metavar="N", help="that add up to a step (default: 1)")
    job.add_argument(
        "--precision",
        choices=DTYPES,
        help="by default what the GPU trains in (bf16; fp16 on a V100), and fp32 without one",
    )
    job.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        help="recompute every block in backward, or none (default: as the preset has it, else --recompute auto)",
    )
    job.add_argument(
        "--recompute", type=_share, metavar="S|auto", help="a share of the blocks from 0 to 1, or as few as fit"
    )
    job.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank on the frozen model")
    job.add_argument("--model-parallel", type=int, metavar="M", help="ranks that share each block (default: 1)")
    job.add_argument("--partition", action="store_true", help="divide checkpoints among model-parallel ranks (P_a)")
    job.add_argument("--activation-offload", action="store_true", help="checkpoints wait on the host (P_a+cpu)")
    hardware = parser.add_argument_group("hardware")
    hardware.add_argument("--gpus", type=int, metavar="N", help="in all nodes together")
    hardware.add_argument("--nodes", type=int, metavar="N", help="that hold the GPUs (default: as few as can)")
    hardware.add_argument("--gpu-memory", type=float, metavar="GB", help="of one GPU")
    hardware.add_argument("--host-memory", type=float, metavar="GB", help="of one node")
    hardware.add_argument("--machine", metavar="NAME", help="a profile: a100, h100, h200, v100, cpu, or a .toml file")
    asked = parser.add_argument_group("questions")
    asked.add_argument("--max-model", action="store_true", help="the largest GPT that fits, by stage and offload")
    asked.add_argument("--tokens", type=float, metavar="T", help="days and GPU-hours of training on so many")
    asked.add_argument("--scale", type=_span, metavar="A..B", help="efficiency from A to B devices")
    asked.add_argument("--paper", action="store_true", help="print the claims of the two papers beside ours")
    asked.add_argument(
        "--calibrate",
        nargs="?",
        const="",
        metavar="FILE",
        help="measure this machine in a minute. Without FILE the profile is stored and used from then on, also "
        'by shard(stage="auto"); with FILE it is written there, for --machine. Under torchrun, links are measured too',
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Answer the question; return 1 if nothing fits."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a configuration may name files of a hub, and a plan needs none
    console = Console(emoji=False) if sys.stdout.isatty() else Console(width=WIDTH, emoji=False)
    _check(arguments)
    if arguments.paper:
        if arguments.json:
            print(json.dumps(paper_table.as_json(), indent=2))
        else:
            paper_table.render(console)
        return 0
    if arguments.calibrate is not None:
        return _calibrate(arguments.calibrate, console)
    return _answer(arguments, console)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse impossible values, and options that have no effect on the question."""
    if arguments.model is not None and arguments.model_option is not None:
        raise ValueError(f"two models are named, {arguments.model} and --model {arguments.model_option}; give one")
    arguments.model, arguments.model_option = arguments.model or arguments.model_option, None
    if arguments.model is None and not (arguments.max_model or arguments.paper or arguments.calibrate is not None):
        raise ValueError("a model is needed: a preset, a Hugging Face config.json or folder, or module:factory")
    for option in ("seq", "micro_batches", "model_parallel", "lora", "tokens"):
        value = getattr(arguments, option)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{option.replace('_', '-')} {value:g}: must be above 0, and finite")
        if value is not None and option in MOST_OF and value > MOST_OF[option]:
            raise ValueError(f"--{option.replace('_', '-')} {value:,}: nobody has more than {MOST_OF[option]:,}")
    if arguments.max_model and arguments.batch == "max":
        raise ValueError("--batch max and --max-model both ask for the largest; give a number to one of them")
    given = _given(arguments)
    for question, used in (("paper", {"json"}), ("calibrate", set[str]())):
        rest = sorted(given - used - {question})
        if question in given and rest:
            raise ValueError(f"--{question} goes alone: --{', --'.join(rest)} would have no effect")
    for option in ("tokens", "scale", "lora", "recompute"):
        if arguments.max_model and option in given:
            raise ValueError(f"--{option} is about one model; name that, without --max-model")
    if arguments.recompute is not None and arguments.checkpointing is not None:
        raise ValueError("--recompute and --checkpointing both say which blocks are recomputed; give one")
    if arguments.recompute == 0:
        arguments.checkpointing, arguments.recompute = False, None
    for option in ("partition", "activation-offload"):
        if arguments.checkpointing is False and option in given:
            raise ValueError(f"--{option} is about checkpoints, and --no-checkpointing leaves none")


def _given(arguments: argparse.Namespace) -> set[str]:
    """Names of the options that the command line gives, as they are written there."""
    known = {name: value for name, value in vars(arguments).items() if name not in ("command", "argv")}
    usual = {"micro_batches": (1,), "checkpointing": (None,)}
    found = {name.replace("_", "-") for name, value in known.items() if value not in usual.get(name, (None, False))}
    return found - {"checkpointing"} | {"no-checkpointing"} if arguments.checkpointing is False else found


def _calibrate(given: str, console: Console) -> int:
    device = calibrate.this_device()
    file = Path(given) if given else calibrated_file(machine.device_title(device))
    if not given:
        file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix != ".toml" or not file.absolute().parent.is_dir():
        raise ValueError(f"--calibrate {file}: must be a .toml file in a folder that exists")
    start_process_group(device)
    found = calibrate.calibrate(device)
    calibrate.write(found, file)
    if int(os.environ.get("RANK", "0")) == 0:
        console.print(f"Measured in {found.seconds:.0f} s: {', '.join(sorted(found.measured))}", highlight=False)
        use = f"zeroshard plan MODEL --machine {file}" if given else f"stored in {file}, and used from now on"
        console.print(f"  {use}", highlight=False, soft_wrap=True)
    end_process_group()
    return 0


def _answer(arguments: argparse.Namespace, console: Console) -> int:
    hardware = find_hardware(
        gpus=arguments.gpus if arguments.gpus is not None or arguments.scale is None else arguments.scale[0],
        nodes=arguments.nodes,
        gpu_memory=arguments.gpu_memory,
        host_memory=arguments.host_memory,
        profile=arguments.machine,
    )
    if arguments.max_model:
        return _largest(arguments, hardware, console)
    subject = find_model(arguments.model)
    if arguments.lora is not None:
        subject = replace(subject, model=with_adapters(subject.model, arguments.lora), preset=None)
    setup = _setup(arguments, subject, hardware)
    if subject.factory is None and arguments.seq is not None and not subject.model.trace(setup).tokens_known:
        raise ValueError(f"--seq {arguments.seq} would have no effect: {subject.name} takes no sequences of tokens")
    if subject.factory is not None:
        setup = subject.factory.settle(setup, _given(arguments))
        subject = replace(subject, batch=setup.batch)
    rows = advice.plan(subject, setup, hardware, arguments.batch or subject.batch)
    best = advice.recommend(rows)
    extras = as_json.extras(best or rows[-1], arguments.tokens, arguments.scale)
    if arguments.json:
        print(json.dumps(as_json.rows(rows, best, hardware, subject) | extras, indent=2))
    else:
        report.print_title(rows, subject, hardware, console)
        report.print_recommendation(best, rows, subject, hardware, console)
        report.print_rows(rows, best, hardware, console)
        if best is not None:
            report.print_memory(best, console)
        report.print_extras(extras, console)
    return 0 if best is not None else NOTHING_FITS


def _largest(arguments: argparse.Namespace, hardware: Hardware, console: Console) -> int:
    vocabulary = largest.VOCABULARY
    usual = Subject(from_config(largest.made_up(1, 2, vocabulary, Setup(stage=0))))
    if arguments.model is not None:
        usual = find_model(arguments.model)
        if usual.config is None:
            raise ValueError(f"--max-model makes up its models: leave {arguments.model} out")
        vocabulary = usual.config.vocabulary
    found = largest.largest_models(_setup(arguments, usual, hardware), hardware, vocabulary)
    if arguments.json:
        print(json.dumps(as_json.largest(found, hardware), indent=2))
    else:
        report.print_largest(found, hardware, console)
    return 0 if any(model is not None for _, model in found) else NOTHING_FITS


def _setup(arguments: argparse.Namespace, subject: Subject, hardware: Hardware) -> Setup:
    degree = arguments.model_parallel
    if degree is None:  # the preset's own, if it divides the devices
        degree = subject.model_parallel if hardware.gpus % subject.model_parallel == 0 else 1
    if hardware.gpus % degree:
        raise ValueError(f"--model-parallel {degree} does not divide {hardware.gpus} devices")
    activations = subject.activations
    if arguments.partition or arguments.activation_offload:
        usual = activations or Activations()
        partition, offload = arguments.partition or usual.partition, arguments.activation_offload or usual.offload
        activations = replace(usual, partition=partition, offload=offload)
    if activations is not None and activations.partition and degree == 1:
        if arguments.partition:
            raise ValueError("--partition divides checkpoints among model-parallel ranks; give --model-parallel too")
        activations = replace(activations, partition=False)
    sequence = arguments.seq or subject.sequence
    if subject.longest is not None and sequence > subject.longest:
        raise ValueError(f"--seq {sequence}: {subject.name} takes {subject.longest} tokens at most")
    checkpointing, recompute = arguments.checkpointing, arguments.recompute
    if checkpointing is None:
        checkpointing = subject.checkpointing or activations is not None or recompute is not None
        if recompute is None and checkpointing and subject.config is None and subject.factory is None:
            recompute = AUTO  # a configuration of Hugging Face says nothing of it
    if recompute is not None:
        activations = replace(activations or Activations(), recompute=recompute)
    return Setup(
        stage=0,
        world=hardware.gpus // degree,
        model_parallel=degree,
        precision=arguments.precision or _usual_precision(hardware),
        batch=arguments.batch if isinstance(arguments.batch, int) else 1,
        sequence=sequence,
        micro_batches=arguments.micro_batches if arguments.micro_batches > 1 else subject.micro_batches,
        checkpointing=checkpointing,
        activations=subject.model.recomputation(checkpointing, activations),
        **_gathering(subject),
    )


def _gathering(subject: Subject) -> dict[str, Any]:
    """A configuration's options for units that are gathered. The precision is not among them: --precision sets it."""
    return gathering(Config.parse(subject.shard)) | {"cast_on_gather": False}


def _usual_precision(hardware: Hardware) -> Any:
    if hardware.on_cpu:
        return "fp32"
    return "bf16" if hardware.machine is None or hardware.guessed else hardware.machine.half


# -- values -----------------------------------------------------------------------------------------------------------


def _batch(text: str) -> int | Literal["max"]:
    if text == "max":
        return "max"
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1, or max")
    return int(text)


def _share(text: str) -> float | Literal["auto"]:
    if text == AUTO:
        return AUTO
    with suppress(ValueError):
        if 0 <= float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} must be a share from 0 to 1, or auto")


def _span(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} must be two numbers of devices, the smaller first: 8..8192")
    if int(match[2]) > MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: nobody has more than {MOST:,}")
    return int(match[1]), int(match[2])
