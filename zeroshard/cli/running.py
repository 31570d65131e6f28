"""What `train` and `finetune` share: options of a run, checks before it, and its ranks, of which this may be one."""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import fields
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from ..config.finetune import LanguageModelConfig
from ..config.job import LOGGERS, Job, resolve_device
from ..integrations.requirement import require
from ..storage.claim import is_claimed, refusal
from ..storage.folder import candidates
from ..storage.format import CheckpointError
from ..system.machine import ensure_bf16_matmul, usable_cores
from ..train.checkpoints import AUTO, FOLDER, NEVER
from ..train.gpt.weights import earlier_weights
from ..train.launch import Nodes, launch, under_torchrun
from ..train.live.json_lines import take_stdout
from ..train.loop import train
from ..train.probe import LEAST_STEPS_TO_TRACE
from ..train.stopping import LauncherWatch, command_title, name_command

CPU_RANKS = 2  # enough to see states divided; more would only share the same cores


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run, which say nothing about what is trained."""
    parser.add_argument("--out", type=Path, metavar="DIR", help="where weights go (default: runs/NAME)")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a timeline of a few steps of rank 0, for ui.perfetto.dev"
    )
    parser.add_argument(
        "--save-every", type=int, metavar="N", help="a checkpoint every N steps; short for --set train.save_every=N"
    )
    parser.add_argument("--keep", type=int, metavar="K", help="checkpoints to keep; short for --set train.keep=K")
    parser.add_argument(
        "--resume",
        default=NEVER,
        metavar="{auto,never,PATH}",
        help="auto goes on from the newest complete checkpoint in the run's folder, if there is one; on any number of "
        "ranks, in any stage (default: never)",
    )
    told = parser.add_argument_group("while it runs")
    told.add_argument(
        "--json", action="store_true", help="one JSON object a line on stdout, and everything else on stderr"
    )
    told.add_argument(
        "--log",
        action="append",
        choices=LOGGERS,
        help="curves of loss, speed, memory and waits, drawn by this library; may be repeated; short for --set "
        "train.log=NAME. tensorboard writes to the run's folder; wandb uploads unless WANDB_MODE says otherwise",
    )
    nodes = parser.add_argument_group("ranks and nodes")
    nodes.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start all ranks anew when one fails, at most N times; goes with --resume auto and --save-every",
    )
    nodes.add_argument(
        "--ranks", type=int, metavar="N", help="ranks on this node (default: one for each GPU, or two on CPU)"
    )
    nodes.add_argument("--nnodes", type=int, default=Nodes.nnodes, metavar="N", help="number of nodes (default: 1)")
    nodes.add_argument("--node-rank", type=int, default=Nodes.node_rank, metavar="I", help="which one this is, from 0")
    nodes.add_argument("--master-addr", metavar="HOST", help="address of node 0; needed with --nnodes above 1")
    nodes.add_argument(
        "--master-port", type=int, default=Nodes.master_port, metavar="PORT", help="port of node 0 (default: 29500)"
    )
    nodes.add_argument("--local-addr", metavar="HOST", help="address of this node, if its host name does not resolve")


def run_job(
    job: Job,
    out: Path,
    arguments: argparse.Namespace,
    argv: Sequence[str],
    before: Callable[[], object] = lambda: None,
) -> int:
    """Check what a run needs, then start the ranks with these arguments of `zeroshard`, or be one.

    `before` is called between the two.
    """
    name_command(arguments.command)
    with redirect_stdout(sys.stderr) if arguments.json else nullcontext():  # libraries print when they are imported
        ranks, nodes = check_run(job, out, arguments)
        try:
            check_trace(arguments.trace, _check_task(job, out))
        except (CheckpointError, OSError) as error:
            raise ValueError(error) from None
    if resolve_device(job.train.device) == "cpu" and (message := ensure_bf16_matmul()):
        print(f"{command_title()}: {message}", file=sys.stderr)  # the ranks inherit the variable that was set
    before()
    if under_torchrun():
        return _be_a_rank(job, out, arguments)
    return launch(ranks, nodes, argv, arguments.restarts)


def check_run(job: Job, out: Path, arguments: argparse.Namespace) -> tuple[int, Nodes]:
    """Refuse options that a run could not begin with. Reads neither model nor data.

    Returns:
        The ranks of this node, and how it finds the other nodes.
    """
    try:
        device = resolve_device(job.train.device)
        if device == "cpu" and job.shard.get("defragment"):
            raise ValueError("shard.defragment has no effect on a CPU; add --set shard.defragment=false")
        ranks, nodes = count_ranks(arguments.ranks, device), _nodes(arguments)
        world = int(os.environ["WORLD_SIZE"]) if under_torchrun() else ranks * nodes.nnodes
        degree = job.train.tensor_parallel
        if world % degree:
            raise ValueError(f"--tensor-parallel {degree} does not divide the {world} rank(s); change it, or --ranks")
        for name in job.train.log:
            require(name, f"train.log = {name!r}", name)
        _check_resume(arguments, job, out)
        _check_free(out, nodes)
    except (CheckpointError, OSError, ImportError) as error:
        raise ValueError(error) from None
    return ranks, nodes


def _check_task(job: Job, out: Path) -> Job:
    """Refuse a job that cannot begin. Returns the job, with its steps if they follow from the data."""
    if not isinstance(job.model, LanguageModelConfig):
        earlier_weights(out)
        return job
    require_libraries(job)
    if under_torchrun():  # the task will look at model and data itself
        return job
    from ..train.language.model import LanguageModel
    from ..train.language.task import read_data, settled_steps
    from ..train.language.weights import earlier_result, folder_of

    earlier_result(folder_of(out, job))
    model = LanguageModel(job.model)
    model.check()
    model.check_weights()
    return settled_steps(job, read_data(job, model, out), model.sequence(job.files.sequence))


def require_libraries(job: Job) -> None:
    """Raise if a library is missing that a job on a Hugging Face model needs.

    Raises:
        ValueError: with the command that installs the library.
    """
    try:
        require("transformers", "a Hugging Face model", "transformers")
        if job.language_model.lora:
            require("peft", "--lora")
    except ImportError as error:
        raise ValueError(error) from None


def _be_a_rank(job: Job, out: Path, arguments: argparse.Namespace) -> int:
    launcher = LauncherWatch()
    json_lines = take_stdout() if arguments.json else None
    # Before and after training, Ctrl-C ends a rank at once and without a traceback. In training it saves.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        record(train)(job, out, arguments.trace, arguments.resume, json_lines)
    except Exception:
        # Where there is a file for errors, the launcher reads the error there and prints it.
        if "TORCHELASTIC_ERROR_FILE" not in os.environ or launcher.is_gone():
            traceback.print_exc()
        return 1
    return 0


def count_ranks(asked: int | None, device: str) -> int:
    """Return how many ranks this node runs."""
    if asked is not None and asked < 1:
        raise ValueError(f"--ranks must be at least 1, is {asked}")
    if device == "cpu":
        return asked or min(CPU_RANKS, usable_cores())
    gpus = torch.cuda.device_count()
    if not gpus:
        raise ValueError("--device cuda: torch sees no GPU here; `zeroshard doctor` says why")
    if asked is not None and asked > gpus:
        raise ValueError(f"--ranks {asked}: this machine has {gpus} GPU(s), and each rank needs its own")
    return asked or gpus


def check_trace(file: Path | None, job: Job) -> None:
    """Refuse a trace that cannot be written, or that would show nothing. The job has its steps."""
    if file is None:
        return
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ValueError(f"--trace {file}: {'is a folder' if file.is_dir() else 'its folder does not exist'}")
    steps_follow = under_torchrun() and not job.train.steps  # the process that started the ranks has looked
    if job.train.steps < LEAST_STEPS_TO_TRACE and not steps_follow:
        raise ValueError(
            f"--trace: of {job.train.steps} step(s) none has settled; use at least {LEAST_STEPS_TO_TRACE} "
            "(--steps, train.steps)"
        )


def _check_resume(arguments: argparse.Namespace, job: Job, out: Path) -> None:
    if arguments.restarts < 0:
        raise ValueError(f"--restarts must be at least 0, is {arguments.restarts}")
    if arguments.restarts and arguments.nnodes > 1:
        raise ValueError("--restarts is for one node; on many, run `torchrun --rdzv-backend c10d --max-restarts N …`")
    if arguments.restarts and (arguments.resume != AUTO or not job.train.save_every):
        raise ValueError("--restarts without --resume auto and --save-every would begin at the first step every time")
    if arguments.resume not in (AUTO, NEVER) and not Path(arguments.resume).is_dir():
        raise ValueError(f"--resume {arguments.resume}: no such folder; it takes auto, never or a checkpoint's path")
    if arguments.resume == NEVER and job.train.save_every and candidates((out / FOLDER).absolute()):
        raise ValueError(
            f"{out / FOLDER} holds checkpoints of an earlier run, which this one would replace; add --resume auto to "
            "go on from them, or choose another folder with --out"
        )


def _check_free(out: Path, nodes: Nodes) -> None:
    """Refuse a folder that cannot be written, or that another job writes to, before ranks are started.

    Rank 0 claims the folder.
    """
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not os.access(there, os.W_OK):
        raise ValueError(f"--out: {there} cannot be written; choose another folder")
    if not under_torchrun() and nodes.node_rank == 0 and is_claimed(out):
        raise ValueError(f"--out: {refusal(out, out)}")


def _nodes(arguments: argparse.Namespace) -> Nodes:
    if arguments.nnodes < 1:
        raise ValueError(f"--nnodes must be at least 1, is {arguments.nnodes}")
    if not 0 <= arguments.node_rank < arguments.nnodes:
        raise ValueError(f"--node-rank must be from 0 to {arguments.nnodes - 1}, is {arguments.node_rank}")
    if arguments.nnodes > 1 and arguments.master_addr is None:
        raise ValueError("--nnodes above 1 needs --master-addr, the address of node 0, the same on every node")
    return Nodes(**{field.name: getattr(arguments, field.name) for field in fields(Nodes)})
