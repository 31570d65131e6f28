"""Options that `train` and `dryrun` share: a configuration, and changes to its values."""

import argparse

from ..config.checks import AUTO, DTYPES
from ..config.job import DEFAULT_PRESET, NONE, OFFLOAD_TO_HOST, parse_override

SHORT_FOR = {
    "stage": "shard.stage",
    "precision": "shard.precision",
    "offload": "shard.offload",
    "device": "train.device",
    "steps": "train.steps",
    "lr": "train.lr",
    "save_every": "train.save_every",
    "keep": "train.keep",
    "log": "train.log",
    "tensor_parallel": "train.tensor_parallel",
}
"""Options that are short for `--set KEY=VALUE`, each with its key. A command may lack some of them."""


def add_job_options(parser: argparse.ArgumentParser, *, auto: bool, precision: str | None = None) -> None:
    """Add the shared options. `auto` allows the value "auto"; without a `precision` the device decides it."""
    chosen = (AUTO,) if auto else ()
    parser.add_argument(
        "config", nargs="?", default=DEFAULT_PRESET, help="a TOML file, or the name of a preset (default: %(default)s)"
    )
    parser.add_argument(
        "--stage", type=_stage, choices=(0, 1, 2, 3, *chosen), help="ZeRO stage; short for --set shard.stage=N"
    )
    parser.add_argument(
        "--offload",
        choices=(OFFLOAD_TO_HOST, *chosen, NONE),
        help="gradients and optimizer states live in host memory; short for --set shard.offload=cpu. "
        + ("auto takes what fits and is fastest. " if auto else "")
        + "Its options: --set shard.offload.moments=bf16 and so on",
    )
    usual = precision or "fp32 on CPU, bf16 on GPU"
    parser.add_argument(
        "--precision", choices=DTYPES, default=precision, help=f"of parameters and gradients (default: {usual})"
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="M",
        help="ranks that divide the model's matrices among them; must divide ranks and heads; short for "
        "--set train.tensor_parallel=M",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="change one value; none takes it away; may be repeated",
    )


def overrides(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the values that the command line changes, by key. None takes a key away."""
    values = {key: getattr(arguments, option, None) for option, key in SHORT_FOR.items()}
    given = {key: None if value == NONE else value for key, value in values.items() if value is not None}
    return given | dict(parse_override(text) for text in arguments.set)


def _stage(text: str) -> int | str:
    return int(text) if text.isdigit() else text
