"""Checks a command of a page as far as a CPU allows: with the real parsers, and by looking for its files."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Sequence

from torch.distributed.run import get_args_parser

from tests.docs.pages import ROOT
from zeroshard.cli.job_options import overrides
from zeroshard.cli.main import parser
from zeroshard.config.job import load_job, presets

YOURS = {"my.toml", "train.py", "script.py", "finetune.toml", "h200.toml"}
"""Names of files that a reader has, and this repository does not."""


def check(command: str) -> None:
    """Raises AssertionError, or exits as argparse does, if a command could not be run."""
    program, *arguments = [part for part in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=\S*", part)]
    known = {
        "zeroshard": check_zeroshard,
        "python": check_python,
        "torchrun": check_torchrun,
        "make": check_make,
        "pip": check_pip,
        "sbatch": check_sbatch,
    }
    assert program in known, f"{command}: tests/docs/commands.py has no check for {program}"
    known[program](arguments)


def check_zeroshard(arguments: Sequence[str]) -> None:
    found = parser().parse_args(arguments)
    model = getattr(found, "model", None)
    if found.command == "plan" and model is not None:
        assert model in {*presets(), *YOURS} or "/" in model or ":" in model, f"{model} is no preset"
    config = getattr(found, "config", None)
    if config is None or found.command == "export":
        return
    if config in presets():
        given = overrides(found)
        load_job(config, {name: value for name, value in given.items() if name != "train.device"})
    else:
        assert config.rpartition("/")[2] in YOURS, f"{config} is no preset"


def check_python(arguments: Sequence[str]) -> None:
    first, *rest = arguments
    if first == "-m":
        module, *rest = rest
        if module == "zeroshard":
            check_zeroshard(rest)
        elif module == "pytest":
            for part in rest:
                assert part.startswith("-") or (ROOT / part).exists(), part
        else:
            path = module.replace(".", "/")
            assert any((ROOT / f"{path}{end}").exists() for end in (".py", "/__main__.py")), module
    else:
        assert first in YOURS or (ROOT / first).is_file(), f"{first} is not there"


def check_torchrun(arguments: Sequence[str]) -> None:
    found = get_args_parser().parse_args(arguments)
    script = found.training_script
    check_python([*(["-m"] if found.module else []), script, *found.training_script_args])


def check_make(arguments: Sequence[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = [part for part in arguments if "=" not in part]
    assert named, "make, but what?"
    assert set(named) <= set(targets), f"no target {named}"


def check_pip(arguments: Sequence[str]) -> None:
    assert arguments[0] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for part in arguments[1:]:
        if match := re.fullmatch(r"(?:zeroshard|\.)\[([\w,]+)\]", part):
            assert set(match[1].split(",")) <= extras.keys(), part
        else:
            assert part in ("-e", ".", "peft"), part


def check_sbatch(arguments: Sequence[str]) -> None:
    script = next(part for part in arguments if part.endswith(".sbatch"))
    assert (ROOT / script).is_file(), script
    check_python(arguments[arguments.index(script) + 1 :])


def known_options() -> set[str]:
    """Every option of `zeroshard` and of torchrun, as a command line has it."""
    (commands,) = (action.choices for action in parser()._actions if action.dest == "command")
    assert isinstance(commands, dict)
    parsers = [*commands.values(), get_args_parser()]
    return {option for one in parsers for action in one._actions for option in action.option_strings}


ELSEWHERE = {
    "make": "sets up an environment",
    "pip": "needs the network",
    "sbatch": "needs Slurm; tests/test_cluster.py runs the script",
    "python": "tests/test_examples.py runs the examples",
}
"""Programs that are not run here, and why."""
TOO_MUCH = {
    "--nnodes": "needs other nodes",
    "--calibrate": "takes a minute, and stores its profile for the user",
    "zero-1000b": "takes minutes",
    "offload-70b": "takes minutes",
    "--sequence 8192": "is for a model with so many positions",
    "--log wandb": "needs libraries that make setup does not install",
    "train.log=wandb": "the same",
}
"""Words of commands that are only read, and why."""


def small(command: str) -> str | None:
    """The command as it can be run here within seconds, or None if it is only read.

    >>> small("zeroshard train zero-1.5b --stage 3")
    'zeroshard train tiny --stage 3 --steps 2'
    >>> small("torchrun --standalone --nproc-per-node 8 train.py")
    'torchrun --standalone --nproc-per-node 2 train.py'
    >>> small("make test")
    """
    program, *arguments = shlex.split(command)
    own = program == "python" and arguments[0] in YOURS
    if (program in ELSEWHERE and not own) or any(word in command for word in TOO_MUCH):
        return None
    if "=" in program or "zeroshard train" not in command:
        return re.sub(r"--nproc-per-node \d+", "--nproc-per-node 2", command)
    named = next((word for word in arguments if word in {*presets(), *YOURS}), None)
    config = "tiny" if named is None or named in presets() else named
    rest = [word for word in arguments[1:] if word != named]
    return shlex.join(["zeroshard", "train", config, *rest, "--steps", "2"])
