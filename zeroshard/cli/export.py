"""`zeroshard export`: a checkpoint as Hugging Face safetensors."""

import argparse
import math
import sys
from pathlib import Path

from ..config.checks import DTYPES
from ..storage.export import export
from ..storage.format import CheckpointError, InvalidIndexError
from ..storage.output import SHARD_BYTES
from ..system.words import printable

HELP = "write a checkpoint as Hugging Face safetensors"
DESCRIPTION = """\
Write a checkpoint's model as safetensors that transformers and PEFT load: shards, index and
configuration. Reads tensor by tensor in one process; neither ranks nor the model's memory are needed.
"""
EXAMPLES = """\
examples:
  zeroshard export runs/job/checkpoints out         the newest checkpoint of a run
  zeroshard export runs/job/checkpoints/step-00000040 out --dtype fp32
  zeroshard export checkpoint out --merge           LoRA adapters added to the base's weights
  zeroshard export checkpoint out --adapter-only    the LoRA adapter alone, for PEFT
"""


def define(parser: argparse.ArgumentParser) -> None:
    """Add the options of `export`."""
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a folder of them: the newest is taken")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--dtype", choices=DTYPES, help="of the parameters (default: that of the training run)")
    parser.add_argument("--config", type=Path, help="a config.json to copy, where the checkpoint has none or another")
    parser.add_argument(
        "--shard-size",
        type=float,
        default=SHARD_BYTES / 1e9,
        metavar="GB",
        help="the largest file (default: %(default)g)",
    )
    adapters = parser.add_mutually_exclusive_group()
    adapters.add_argument("--merge", action="store_true", help="add LoRA adapters to the weights")
    adapters.add_argument("--adapter-only", action="store_true", help="write the LoRA adapter alone")
    parser.add_argument(
        "--adapter", default="default", metavar="NAME", help="which one, with --adapter-only (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Export, and say what was written."""
    if not 0 < arguments.shard_size < math.inf:
        raise ValueError(f"--shard-size must be above 0, and finite, is {arguments.shard_size:g}")
    try:
        files = export(
            arguments.checkpoint,
            arguments.out,
            dtype=DTYPES[arguments.dtype] if arguments.dtype else None,
            adapter=arguments.adapter if arguments.adapter_only else None,
            merge=arguments.merge,
            shard_bytes=round(arguments.shard_size * 1e9),
            config=arguments.config,
        )
    except (CheckpointError, OSError) as error:
        print(f"zeroshard export: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, InvalidIndexError) else 1
    for file in files:
        print(f"{file} ({file.stat().st_size / 1e6:.1f} MB)")
    if not any(file.name.endswith("config.json") for file in files):
        print("zeroshard export: the model has no configuration that could be written; add one with --config")
    return 0
