"""The entry point of the `zeroshard` command; exit codes are 0 for success, 1 for a failure, 2 for bad input."""

import argparse
import sys
from collections.abc import Sequence

from . import doctor, dryrun, export, plan, train


def parser() -> argparse.ArgumentParser:
    """Return the command line of `zeroshard`, with one subcommand for each module beside this one."""
    command = argparse.ArgumentParser(
        prog="zeroshard", description="ZeRO stages 0 to 3 for unchanged PyTorch models and training loops."
    )
    subcommands = command.add_subparsers(required=True, metavar="COMMAND", title="commands")
    train.define(subcommands.add_parser)
    plan.define(subcommands.add_parser)
    dryrun.define(subcommands.add_parser)
    export.define(subcommands.add_parser)
    doctor.define(subcommands.add_parser)
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; argparse itself exits with 2 on bad input."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(given)
    arguments.argv = given  # what `train` starts its ranks with
    code: int = arguments.run(arguments)
    return code
