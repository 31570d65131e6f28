"""`zeroshard train`: the ready-made job. It starts the ranks; in the environment of torchrun it is a rank itself."""

import argparse
from pathlib import Path

from ..config.job import CONFIGURATION, DEVICES, Job, load_job, presets
from .job_options import add_job_options, overrides
from .running import add_run_options, run_job

HELP = "train a GPT from a TOML configuration, on one machine or many"
DESCRIPTION = """\
Train a GPT from a TOML configuration: by default a byte-level one on the source files of
Python's standard library, in stage 3, on all GPUs or on two CPU ranks. Evaluates on
held-out files, saves the weights as safetensors, samples from them, and sets memory,
volume and, with --offload, traffic between host and device beside the papers' formulas.
"""
EXAMPLES = """\
examples:
  zeroshard train                                  the default: 10M parameters, about two minutes on two cores
  zeroshard train --stage 1 --steps 50             another stage, fewer steps
  zeroshard train --ranks 4 --tensor-parallel 2    two ranks divide the matrices, two replicas the states
  zeroshard train --offload cpu                    gradients and optimizer states in host memory
  zeroshard train --offload cpu --trace step.json  and a timeline of three steps, for ui.perfetto.dev
  zeroshard train my.toml --set train.lr=3e-4      a configuration of your own, one value changed
  zeroshard train --list                           the presets

many nodes: the same command on every node, each with its own --node-rank
  zeroshard train zero-1.5b --nnodes 2 --node-rank 0 --master-addr node0
  zeroshard train zero-1.5b --nnodes 2 --node-rank 1 --master-addr node0
or under a torchrun of your own
  torchrun --nnodes 2 --node-rank 0 --master-addr node0 --nproc-per-node 8 -m zeroshard train zero-1.5b
"""


def define(parser: argparse.ArgumentParser) -> None:
    """Add the options of `train`."""
    add_job_options(parser, auto=True)
    parser.add_argument("--list", action="store_true", help="show the presets and end")
    parser.add_argument("--device", choices=DEVICES, help="auto takes the GPUs where there are some")
    parser.add_argument("--steps", type=int, help="short for --set train.steps=N")
    parser.add_argument("--lr", type=float, help="the highest learning rate; short for --set train.lr=RATE")
    add_run_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check the configuration, then start the ranks or be one."""
    if arguments.list:
        return _list_presets()
    job = load_job(arguments.config, overrides(arguments))
    return run_job(job, arguments.out or usual_folder(arguments.config, job), arguments, arguments.argv)


def usual_folder(config: str, job: Job) -> Path:
    """Return where a run writes by default: beside a `finetune.toml`, which is in the folder of its run."""
    return Path(config).parent if Path(config).name == CONFIGURATION else Path("runs") / job.name


def _list_presets() -> int:
    jobs = [load_job(name) for name in presets()]
    for job in sorted(jobs, key=lambda job: job.gpt.parameters):
        billions = job.gpt.parameters / 1e9
        size = f"{billions:.1f}B" if billions > 1 else f"{1000 * billions:.1f}M"
        offload = ", offload cpu" if "offload" in job.shard else ""
        shape = f"{job.gpt.layers} layers of {job.gpt.hidden}"
        print(f"{job.name:14} {size:>7}  {shape}, stage {job.shard['stage']}{offload}")
    return 0
