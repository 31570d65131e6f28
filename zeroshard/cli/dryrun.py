"""`zeroshard dryrun`: one rank of a world that is not there, run for real."""

import argparse
import sys
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from zeroshard.plan.dryrun import DryRun, dry_run
from zeroshard.train.gpt import GPT
from zeroshard.train.job import DEFAULT_PRESET, Job, load_job, parse_override
from zeroshard.train.loop import parameter_groups
from zeroshard.train.paper import paper_memory, paper_volume

DESCRIPTION = """\
Run rank r of a world of N for three steps on this machine: the real runtime with the real shapes, and
nobody to talk to. With a GPU its memory is real; without one, tensors have shapes and no values, and what is
counted is what would be alive. Sets model states and volume beside the paper's formulas.
"""
EXAMPLES = """\
examples:
  zeroshard dryrun zero-8b --world 64 --stage 2
  zeroshard dryrun zero-100b --world 400 --rank 7 --set train.batch=1
"""
BAD_INPUT = 2


def define(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `dryrun` to the command line."""
    parser = add_parser(
        "dryrun",
        help="run one rank of N on this machine, and see what it holds and would send",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("config", nargs="?", default=DEFAULT_PRESET, help="as for `zeroshard train`")
    parser.add_argument("--world", type=int, required=True, metavar="N", help="ranks that there would be")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="which of them to run (default: 0)")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="short for --set shard.stage=N")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="bf16", help="(default: bf16)")
    parser.add_argument("--without-gpu", action="store_true", help="shapes without values, also where there is a GPU")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="change one value")


def run(arguments: argparse.Namespace) -> int:
    """Check the configuration, run the rank, print the table."""
    overrides: dict[str, object] = {"shard.precision": arguments.precision}
    if arguments.stage is not None:
        overrides["shard.stage"] = arguments.stage
    try:
        job = load_job(arguments.config, overrides | dict(parse_override(text) for text in arguments.set))
        if arguments.world < 1:
            raise ValueError(f"--world must be at least 1, is {arguments.world}")
        real = torch.cuda.is_available() and not arguments.without_gpu
        result = _run(job, arguments.world, arguments.rank, real)
    except ValueError as error:
        print(f"zeroshard dryrun: {error}", file=sys.stderr)
        return BAD_INPUT
    Console().print(_table(job, result, arguments.world, arguments.rank))
    return 0


def _run(job: Job, world: int, rank: int, real: bool) -> DryRun:
    shape = (job.train.batch, job.model.sequence)

    def loss(model: nn.Module) -> Tensor:
        tokens = torch.zeros(shape, dtype=torch.long, device="cuda" if real else "cpu")
        output: Tensor = model(tokens, tokens)
        return output

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameter_groups(model, job.train.weight_decay), lr=job.train.lr)

    return dry_run(lambda: GPT(job.model), optimizer, loss, world=world, rank=rank, real=real, **job.shard)


def _table(job: Job, result: DryRun, world: int, rank: int) -> Table:
    stage = int(str(job.shard.get("stage", 3)))
    how = "memory of this GPU" if result.real else "shapes without values"
    size = f"{result.parameters / 1e9:.2f}B parameters"
    title = f"{job.name} · {size} · stage {stage} · rank {rank} of {world} · {how}"
    table = Table(title=title, title_justify="left")
    for name in ("", "this run", "paper", "formula"):
        table.add_column(name, justify="left" if name in ("", "formula") else "right")
    rows = paper_memory(stage, world, job.precision)
    held = (result.at_step.parameters, result.at_step.gradients, result.at_step.optimizer_states)
    for row, bytes_held in zip(rows, held, strict=True):
        table.add_row(f"{row.kind}, GB", _gb(bytes_held), _gb(row.bytes(result.parameters)), str(row))
    total = sum(row.bytes(result.parameters) for row in rows)
    table.add_row("all model states, GB", _gb(result.at_step.model_states), _gb(total))
    volume, written = paper_volume(stage, world, result.kept / result.parameters)
    counted = result.volume_elements / result.parameters
    table.add_row("volume per step, Ψ", f"{counted:.3f}", f"{volume:.3f}", written, end_section=True)
    table.add_row("at rest, GB", _gb(result.at_rest))
    table.add_row("peak with activations, GB", _gb(result.peak))
    return table


def _gb(size: float) -> str:
    return f"{size / 1e9:,.3f}"
