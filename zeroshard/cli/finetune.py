"""`zeroshard finetune`: trains a Hugging Face model on files. It writes a configuration, and runs as `train` does."""

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from ..config.checks import AUTO, DTYPES
from ..config.job import CONFIGURATION, DEVICES, Job, changed, job_of, resolve_device
from ..storage.format import CheckpointError
from ..system.machine import device_of_rank
from ..train.checkpoints import Start
from .job_options import overrides
from .running import add_run_options, check_run, check_trace, require_libraries, run_job

HELP = "fine-tune a Hugging Face model on your files, whole or with LoRA"
DESCRIPTION = """\
Train a causal language model of Hugging Face on text, JSON lines or Parquet: all of it, or LoRA
adapters beside it. Stage, offload, recomputation and micro-batch come from the plan for this
machine, which is printed first. Ends with a folder that transformers loads, or PEFT.

DATA are files and folders: .txt (a document each), .jsonl and .parquet with "text", with "prompt"
and "completion" (only the completion is learned), or with "messages" (only the assistant's turns).
"""
EXAMPLES = """\
examples:
  zeroshard finetune models/llama chats.jsonl              all parameters, one epoch, on all GPUs
  zeroshard finetune models/llama chats.jsonl --dry-run    what would run, and whether it fits
  zeroshard finetune models/llama chats.jsonl --lora 16    adapters of rank 16 on a frozen model
  zeroshard finetune models/llama books/ --sequence 8192 --epochs 2
  zeroshard finetune models/llama chats.jsonl --offload cpu --stage 2 --set train.batch=4
  zeroshard finetune models/llama chats.jsonl --save-every 100 --resume auto --restarts 3
  zeroshard train runs/llama/finetune.toml                 the same job, from the file that it wrote

many nodes: the same command on every node, each with its own --node-rank (and one folder for all)
  zeroshard finetune models/llama chats.jsonl --nnodes 2 --node-rank 0 --master-addr node0
"""
SHORT_FOR = {
    "lora": "model.lora",
    "sequence": "data.sequence",
    "tokens_per_step": "train.tokens_per_step",
    "epochs": "train.epochs",
}
"""Options that are short for a key of the configuration, beside those of `job_options`."""
CLIP = 1.0


def define(parser: argparse.ArgumentParser) -> None:
    """Add the options of `finetune`."""
    parser.add_argument("model", help="a folder with config.json, safetensors and tokenizer, or a name on the hub")
    parser.add_argument("data", nargs="+", help="files, and folders of files")
    what = parser.add_argument_group("what is trained")
    what.add_argument("--lora", type=int, metavar="R", help="train adapters of this rank, and freeze the model")
    what.add_argument("--sequence", type=int, metavar="N", help="tokens of a sequence (default: 2048, or what fits)")
    what.add_argument(
        "--tokens-per-step",
        type=int,
        metavar="N",
        help="tokens of all ranks in a step; what does not fit at once is accumulated (default: 32768)",
    )
    what.add_argument("--epochs", type=float, metavar="N", help="times that each document is trained on (default: 1)")
    what.add_argument("--steps", type=int, metavar="N", help="in place of --epochs")
    what.add_argument("--lr", type=float, help="the highest learning rate (default: 2e-5, with --lora 2e-4)")
    how = parser.add_argument_group("how")
    how.add_argument("--dry-run", action="store_true", help="read everything, print the plan, and end")
    how.add_argument("--stage", choices=("0", "1", "2", "3", AUTO), default=AUTO, help="ZeRO stage (default: auto)")
    how.add_argument(
        "--offload", choices=("none", "cpu", AUTO), default=AUTO, help="optimizer states in host memory (default: auto)"
    )
    how.add_argument(
        "--precision", choices=DTYPES, help="of parameters and gradients (default: fp32 on CPU, bf16 on GPU)"
    )
    how.add_argument("--device", choices=DEVICES, help="auto takes the GPUs where there are some")
    how.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="any value of the configuration, as shard.offload.moments=bf16; none takes it away; may be repeated",
    )
    add_run_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the configuration, then run it as `train` does."""
    out = arguments.out or Path("runs") / Path(arguments.model).expanduser().absolute().name
    tables = _tables(arguments)
    job = job_of(tables, "the options of finetune", out.name)
    if arguments.dry_run:
        return _dry_run(job, out, arguments)
    text = _toml(tables)
    file = out / CONFIGURATION
    arguments.trace = None if arguments.trace is None else arguments.trace.absolute()
    argv = ["train", str(file), "--out", str(out), "--resume", arguments.resume, "--restarts", str(arguments.restarts)]
    argv += ["--json"] if arguments.json else []
    for name, value in _given(arguments).items():
        argv += [f"--{name}", str(value)]
    return run_job(job, out, arguments, argv, before=lambda: _write(file, text))


def _given(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the options of a run that are not in the configuration, as `train` takes them."""
    names = ("trace", "ranks", "nnodes", "node_rank", "master_addr", "master_port", "local_addr")
    found = {name: getattr(arguments, name) for name in names}
    return {name.replace("_", "-"): value for name, value in found.items() if value is not None}


def _tables(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the configuration that the options describe. Paths are absolute, so that it can be run from anywhere."""
    folder = Path(arguments.model).expanduser()
    files = [str(Path(file).expanduser().absolute()) for file in arguments.data]
    shard: dict[str, object] = {"stage": AUTO, "clip_grad_norm": CLIP, "activations": {"recompute": AUTO}}
    tables: dict[str, object] = {
        "model": {"huggingface": str(folder.absolute()) if folder.exists() else arguments.model},
        "data": {"files": files},
        "train": {},
        "shard": shard | ({} if arguments.offload == "none" else {"offload": arguments.offload}),
    }
    arguments.offload = None
    arguments.stage = AUTO if arguments.stage == AUTO else int(arguments.stage)
    short = {key: getattr(arguments, option) for option, key in SHORT_FOR.items()}
    given = {key: value for key, value in short.items() if value is not None} | overrides(arguments)
    return changed(tables, "the options of finetune", given)


def _write(file: Path, text: str) -> None:
    if os.environ.get("RANK", "0") != "0":  # under a torchrun of the user's
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _toml(tables: Mapping[str, object]) -> str:
    """Return a configuration as TOML."""
    lines = ["# Written by `zeroshard finetune`. Run it with `zeroshard train` and the path of this file."]
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        assert isinstance(table, Mapping)
        lines += [f"{key} = {_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)


def _dry_run(job: Job, out: Path, arguments: argparse.Namespace) -> int:
    """Read model and data, print what would run, and start nothing. Returns 1 if it would not fit."""
    require_libraries(job)
    from ..plan.room import room_of
    from ..train.language.model import LanguageModel
    from ..train.language.task import (
        headline,
        identity_of,
        less_than_a_step,
        optimizer_of,
        plan_of,
        read_data,
        settled_steps,
        sizes_of,
    )

    if arguments.json:
        raise ValueError("--json is for the steps of a run, and --dry-run makes none; leave one out")
    device = resolve_device(job.train.device)
    arguments.master_addr = arguments.master_addr or ""  # nobody is called
    ranks, nodes = check_run(job, out, arguments)
    world = ranks * nodes.nnodes
    source = LanguageModel(job.language_model)
    source.check()
    source.check_weights()
    sequence = source.sequence(job.files.sequence)
    data = read_data(job, source, None)
    warning = less_than_a_step(job, data, sequence)
    job = settled_steps(job, data, sequence)
    check_trace(arguments.trace, job)
    try:
        start = Start.find(job, out, arguments.resume, world, identity_of(data))
    except (CheckpointError, OSError) as error:
        raise ValueError(error) from None
    model = source.build(job.train.seed)
    sharing = 1 if device == "cuda" else ranks
    room = room_of(model, device_of_rank(torch.device(device)), local_ranks=ranks, device_ranks=sharing)
    found = plan_of(job, source, model, optimizer_of(job, model), room, world, sequence)
    print("\n".join([*headline(job, source, data, sizes_of(model), sequence), *warning, found.told]))
    if start.path is not None:
        print(f"it would go on from {start.path}")
    print("a dry run: nothing was started" + ("" if found.fits else ", and this would not fit"))
    return 0 if found.fits else 1
