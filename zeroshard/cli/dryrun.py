"""`zeroshard dryrun`: runs one rank of N alone on this machine, and prints its memory and its volume."""

import argparse
import json
import math
import sys
from contextlib import redirect_stdout

import torch
from rich.console import Console
from torch import Tensor, nn

from ..config.job import Job, load_job
from ..config.options import Config
from ..plan.comparison import Comparison
from ..plan.dryrun import DryRun, dry_run
from ..train.gpt import GPT
from ..train.gpt.tensor_parallel import parallelise
from ..train.task import parameter_groups
from .job_options import add_job_options, overrides

HELP = "run one rank of N on this machine, and see its memory and what it would send"
DESCRIPTION = """\
Run rank r of a world of N for a few steps on this machine: the real runtime with the real shapes, and
nobody to talk to. With a GPU its memory is real; without one, tensors have shapes and no values, and what is
counted is what would be alive. Sets memory by kind and volume beside the plan and the paper's formulas.
"""
EXAMPLES = """\
examples:
  zeroshard dryrun zero-7.5b --world 64 --stage 1      figure 1 of the ZeRO paper; stages 2 and 3 likewise
  zeroshard dryrun zero-1000b --world 1024 --memory-cap 32   a rank of a trillion parameters, in minutes
  zeroshard dryrun zero-8b --world 4 --offload cpu     what is on the device, and what on the host
  zeroshard dryrun zero-100b --world 400 --rank 7 --set train.batch=1
"""
TOO_MUCH = 1
GIB = 2**30
WIDTH = 110  # characters of a line where there is no terminal


def define(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dryrun`."""
    add_job_options(parser, auto=False, precision="bf16")
    parser.add_argument("--world", type=int, required=True, metavar="N", help="ranks that there would be")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="which of them to run (default: 0)")
    parser.add_argument("--without-gpu", action="store_true", help="shapes without values, also where there is a GPU")
    parser.add_argument("--memory-cap", type=float, metavar="GIB", help="fail if it takes more of the device")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Check the configuration, run the rank, print the table."""
    job, world, rank = load_job(arguments.config, overrides(arguments)), arguments.world, arguments.rank
    if world < 1:
        raise ValueError(f"--world must be at least 1, is {world}")
    if not 0 <= rank < world:
        raise ValueError(f"--rank {rank} does not exist in a world of {world}")
    config = Config.parse(job.shard)
    if config.stage == "auto" or config.chooses_offload:
        raise ValueError('"auto" is chosen where a job starts; name a stage and an offload, or ask `zeroshard plan`')
    real = torch.cuda.is_available() and not arguments.without_gpu
    cap = _cap(arguments.memory_cap, real)
    try:
        with redirect_stdout(sys.stderr):  # messages of the run are no part of the answer
            seen = Comparison(job, config, world, rank, _run(job, world, rank, real))
    except torch.OutOfMemoryError as error:
        return _fail("\n".join([str(error), *getattr(error, "__notes__", [])]))
    if arguments.json:
        print(json.dumps(seen.as_json(), indent=2))
    else:
        console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
        console.print(seen.table())
    if seen.run.peak > cap:
        peak = seen.run.peak / GIB
        return _fail(
            f"its peak of {peak:.4g} GiB ({seen.run.peak / 1e9:.4g} GB) is above --memory-cap "
            f"{arguments.memory_cap:g} GiB; "
            "`zeroshard plan` lists the stages and offloads that fit"
        )
    return 0


def _fail(why: str) -> int:
    print(f"zeroshard dryrun: {why}", file=sys.stderr)
    return TOO_MUCH


def _cap(asked: float | None, real: bool) -> float:
    """Return the cap in bytes. Where memory is real, torch's allocator raises above it."""
    if asked is None:
        return math.inf
    if not 0 < asked < math.inf:
        raise ValueError(f"--memory-cap {asked:g} must be above 0")
    if real:
        whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, asked * GIB / whole))
    return asked * GIB


def _run(job: Job, world: int, rank: int, real: bool) -> DryRun:
    shape = (job.train.batch, job.gpt.sequence)

    def loss(model: nn.Module) -> Tensor:
        tokens = torch.zeros(shape, dtype=torch.long, device="cuda" if real else "cpu")
        for _ in range(job.train.micro_batches - 1):
            model(tokens, tokens).backward()
        output: Tensor = model(tokens, tokens)
        return output

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        # Torch chooses foreach=True on a GPU. It needs temporary memory that a loop over parameters does not need.
        return torch.optim.AdamW(parameter_groups(model, job.train.weight_decay), lr=job.train.lr, foreach=True)

    return dry_run(
        lambda: GPT(job.built_model),
        optimizer,
        loss,
        world=world,
        rank=rank,
        real=real,
        tensor_parallel=job.train.tensor_parallel,
        parallelise=parallelise,
        **job.shard,
    )
